"""Tests of the real server and the clients that people use with it."""

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.commands import run
from tests.support.engines.server import MODEL, Server

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _idle(server: Server) -> Iterator[None]:
    """Check that no test leaves a request or a KV block in use."""
    yield
    server.wait_until_idle()


def test_counters(server: Server) -> None:
    """The ``vllm_diffusion:*`` counters report exactly what one request took."""
    names = ("passes", "encode_rows", "canvas_rows", "projected_rows", "denoise_steps", "canvases")

    def counters() -> dict[str, float]:
        server.wait_until_idle()
        return {name: server.metric(f"vllm_diffusion:{name}_total") for name in names}

    def ask(prompt: str) -> Any:
        return server.client().completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=server.canvas_length,
            extra_body={"vllm_xargs": {"diffusion_max_steps": 1}, "ignore_eos": True},
        )

    ask("first")
    before = counters()
    usage = ask("Nothing like it before").usage
    moved = {name: value - before[name] for name, value in counters().items()}
    assert moved["denoise_steps"] == 1
    assert moved["canvases"] == 1
    assert moved["canvas_rows"] == server.canvas_length
    # The step's, with the prompt; the finished canvas may be encoded or not.
    assert moved["passes"] in (1, 2)
    assert moved["encode_rows"] in (
        usage.prompt_tokens,
        usage.prompt_tokens + server.canvas_length,
    )


def test_live_canvas_example(server: Server) -> None:
    """The example answers its own question rightly with canvases that change from step to step."""
    example = Path(__file__).parents[2] / "examples/live_canvas.py"
    of_server = {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{server.url}/v1"}
    done = run(sys.executable, example, timeout=120, env=os.environ | of_server)
    frames = re.findall(r"^canvas (\d+), step +\d+: (.*)$", done.stdout, re.MULTILINE)
    assert len(set(frames)) >= len({block for block, _ in frames}) + 2
    answer = "lamp: LAMP, river: RIVER, stone: STONE, cloud: CLOUD"
    assert done.stdout.endswith(f"answer: {answer}\n")
