"""``vllm serve`` with a draft and several ranks, stages or engines gives the target's own
tokens.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.commands import run
from tests.support.engines.tiny_pair import dflash, greedy_answer, greedy_answers, serving
from vllm_diffusion.checkpoints import shipped_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

DFLASH = dflash()
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
    run(sys.executable, EXAMPLE, "--out", folder, "--steps", "150", timeout=800)
    return folder


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
    """In every layout, requests that are sent one by one or eight at once get the target's own
    tokens, and verifications accept as many drafted tokens as in one process.
    """
    if spec["method"] == "eagle3":
        spec = spec | {"model": str(request.getfixturevalue("eagle3"))}
    with serving(tmp_path, spec, drafting, layout) as server:
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
