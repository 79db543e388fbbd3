"""Commands of the pages for the shipped checkpoint, run as they stand, in one shell and in front of one server."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
# The server's block ends with its command, which goes on in the background until the others have run.
SCRIPT = """
set -e
{serve} &
trap 'kill -TERM $!; wait $!' EXIT
until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do kill -0 $!; sleep 0.5; done
{commands}
"""


def block(page: str, holds: str) -> str:
    """Return the one shell block of a page that holds a text."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (found,) = [each for each in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if holds in each]
    return found.strip()


def test_commands_of_pages() -> None:
    """The server starts, and the clients that the pages name get right answers from it."""
    with socket.socket() as taken:
        if not taken.connect_ex(("127.0.0.1", 8000)):
            pytest.skip("needs port 8000, which the pages name")
    chat = block("docs/use/live-canvas.md", "vllm-diffusion chat").splitlines()[1]
    bench = block("docs/use/serving.md", "vllm bench serve")
    page = (ROOT / "docs/use/serving.md").read_text(encoding="utf-8")
    examples = re.findall(r"`(examples/\w+\.py)`", page.partition("## The 26B")[0])
    assert len(examples) == 2
    commands = [
        block("docs/use/serving.md", "openai_client.py"),
        *(f"python {example}" for example in examples),
        f"{chat} <<< 'What is 7+8?'",
        # The first measures a GPU, for longer.
        "vllm bench serve" + bench.split("vllm bench serve")[2],
    ]
    environment = {
        name: value
        for name, value in os.environ.items()
        # What a user has not set.
        if name not in ("VLLM_ENABLE_V1_MULTIPROCESSING", "TRITON_INTERPRET", "VLLM_API_KEY")
    }
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    serve = block("docs/use/serving.md", 'vllm serve "$(vllm-diffusion checkpoint)"')
    ended = subprocess.run(
        ["bash", "-c", SCRIPT.format(serve=serve, commands="\n".join(commands))],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for said in (
        "answer:    15\n",
        "streamed:  15\n",
        "answer: lamp: LAMP",
        "{'name': 'kite', 'age': 42}\n",
        "\n15\n",
    ):
        assert said in ended.stdout, ended.stdout
    assert re.search(r"Successful requests: +4\b", ended.stdout), ended.stdout
    # 0.00 where vLLM drops the chunks of a canvas.
    assert re.search(r"Mean TPOT \(ms\): +(?!0\.00)[0-9.]+", ended.stdout), ended.stdout
