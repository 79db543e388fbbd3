"""``vllm serve`` with a draft and several ranks, stages or engines: the target's own tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.server import start_server, stop_server
from tests.support.tiny_pair import greedy_answer, greedy_answers
from vllm_diffusion.cli.checkpoint import shipped_checkpoint, shipped_draft

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

DFLASH = {"method": "dflash", "model": str(shipped_draft()), "num_speculative_tokens": 7}
SAME = {
    "method": "draft_model",
    "model": str(shipped_checkpoint("qwen3")),
    "num_speculative_tokens": 3,
}
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}
# Its model is trained by an example.
EAGLE3 = {"method": "eagle3", "num_speculative_tokens": 3}
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "checkpoints" / "train_tiny_eagle3.py"
TENSOR = ("--tensor-parallel-size", "2")
PIPELINE = ("--pipeline-parallel-size", "2")
DATA = ("--data-parallel-size", "2")


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return greedy_answers()


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle3") / "draft"
    command = [sys.executable, str(EXAMPLE), "--out", str(folder), "--steps", "150"]
    subprocess.run(command, check=True, timeout=800)
    return folder


def options_of(spec: dict[str, Any], drafting: dict[str, Any]) -> list[str]:
    options = ["--speculative-config", json.dumps(spec)]
    if drafting:
        options += ["--additional-config", json.dumps({"drafting": drafting})]
    return options


@pytest.mark.parametrize(
    ("spec", "drafting", "layout", "at_least"),
    [
        pytest.param(DFLASH, {}, TENSOR, 5, id="one pass, two ranks"),
        pytest.param(DFLASH, {"steps": 2}, PIPELINE, 5, id="two passes, two stages"),
        pytest.param(DFLASH, {"adaptive": True}, PIPELINE, 3, id="adaptive, two stages"),
        pytest.param(SAME, {}, TENSOR, 3, id="a smaller model, two ranks"),
        pytest.param(DFLASH, {"adaptive": True}, DATA, 5, id="adaptive, two engines"),
        pytest.param(SAME, {}, DATA, 3, id="a smaller model, two engines"),
        pytest.param(NGRAM, {}, TENSOR, 1.2, id="n-grams, two ranks"),
        pytest.param(NGRAM, {}, PIPELINE, 1.2, id="n-grams, two stages"),
        pytest.param(NGRAM, {}, DATA, 1.2, id="n-grams, two engines"),
        pytest.param(EAGLE3, {}, TENSOR, 1.5, id="EAGLE-3, two ranks"),
        pytest.param(EAGLE3, {}, PIPELINE, 1.5, id="EAGLE-3, two stages"),
        pytest.param(EAGLE3, {}, DATA, 1.5, id="EAGLE-3, two engines"),
    ],
)
def test_tokens(
    spec: dict[str, Any],
    drafting: dict[str, Any],
    layout: tuple[str, ...],
    at_least: float,
    expected: dict[str, list[int]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """Alone and eight at once; drafts are kept as they are in one process."""
    if spec["method"] == "eagle3":
        spec = spec | {"model": str(request.getfixturevalue("eagle3"))}
    server = start_server(
        shipped_checkpoint("qwen3"), tmp_path / "log", *options_of(spec, drafting), *layout
    )
    try:
        assert {question: greedy_answer(server, question) for question in expected} == expected
        with ThreadPoolExecutor(len(expected)) as pool:
            answers = pool.map(lambda question: greedy_answer(server, question), expected)
            assert dict(zip(expected, answers, strict=True)) == expected
        verified = server.metric("vllm:spec_decode_num_drafts_total")
        drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
        accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        assert 1 + accepted / verified > at_least
        log = server.log.read_text(errors="replace")
        assert "Traceback" not in log
        if drafting.get("adaptive") and layout == DATA:
            assert "adaptive=true is off" in log
            assert drafted == spec["num_speculative_tokens"] * verified
    finally:
        stop_server(server)


@pytest.mark.parametrize(
    ("spec", "options", "remedy"),
    [
        pytest.param(DFLASH, ["--no-async-scheduling"], "--no-async-scheduling", id="in step"),
        pytest.param(SAME, [], "--pipeline-parallel-size", id="a smaller model"),
    ],
)
def test_stages_are_refused(
    spec: dict[str, Any], options: list[str], remedy: str, tmp_path: Path
) -> None:
    """vLLM's synchronous scheduler hands stages no drafts in time, and a draft that is a model of its own
    is cut into stages too: said before anything is loaded."""
    options = [*options_of(spec, {}), *PIPELINE, *options]
    with pytest.raises(RuntimeError) as refused:
        start_server(shipped_checkpoint("qwen3"), tmp_path / "log", *options)
    log = str(refused.value)
    assert f"leave {remedy} out" in log
    assert "Loading weights" not in log
