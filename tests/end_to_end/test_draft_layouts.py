"""``vllm serve`` with a draft and several ranks, stages or engines: the target's own tokens."""

from __future__ import annotations

import json
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
TENSOR = ("--tensor-parallel-size", "2")
PIPELINE = ("--pipeline-parallel-size", "2")
DATA = ("--data-parallel-size", "2")


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return greedy_answers()


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
    ],
)
def test_tokens(
    spec: dict[str, Any],
    drafting: dict[str, Any],
    layout: tuple[str, ...],
    at_least: float,
    expected: dict[str, list[int]],
    tmp_path: Path,
) -> None:
    """Alone and eight at once; drafts are kept as they are in one process."""
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
        if layout == DATA:
            assert "adaptive=true is off" in log
            assert drafted == spec["num_speculative_tokens"] * verified
    finally:
        stop_server(server)


def test_stages_in_step_are_refused(tmp_path: Path) -> None:
    """vLLM's synchronous scheduler hands stages no drafts in time: said before anything is loaded."""
    options = [*options_of(DFLASH, {}), *PIPELINE, "--no-async-scheduling"]
    with pytest.raises(RuntimeError) as refused:
        start_server(shipped_checkpoint("qwen3"), tmp_path / "log", *options)
    log = str(refused.value)
    assert "leave --no-async-scheduling out" in log
    assert "Loading weights" not in log
