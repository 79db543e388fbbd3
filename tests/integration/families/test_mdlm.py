"""A2D's MDLM and its bodies give the tokens of the publisher's loops in batches."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.engines.engine import ASYNCHRONOUS_OFTEN, TracedEngine
from tests.support.families import makers as tiny
from tests.support.families.cases import CASES, Case, Wanted, expected, mdlm_case
from tests.support.families.model import prompt_of

pytestmark = pytest.mark.engine

MDLM = {
    "qwen3": mdlm_case(tiny.a2d, "A2DQwen3MDLM", is_shifted=False),
    "qwen3, shifted": mdlm_case(tiny.a2d, "A2DQwen3MDLM", is_shifted=True),
    "qwen2": mdlm_case(tiny.a2d_qwen2, "A2DQwen2MDLM", is_shifted=False),
    "llama": mdlm_case(tiny.a2d_llama, "A2DLlamaMDLM", is_shifted=False),
}
BD3LM = {
    "BD3LM on qwen2": replace(CASES["a2d"], make=tiny.a2d_qwen2),
    "BD3LM on llama": replace(CASES["a2d"], make=tiny.a2d_llama),
}
# With steps that do not divide a block, and answers that end within one.
WANTED = (
    Wanted(max_tokens=16, strategy="static"),
    Wanted(max_tokens=41, strategy="static", steps=5),
    Wanted(max_tokens=7, strategy="static", steps=9),
    Wanted(max_tokens=33, strategy="static", temperature=0.8, seed=4),
    Wanted(max_tokens=50, threshold=0.2, seed=5),
)


def assert_loops(case: Case, folder: Path, wanted: list[Wanted], is_asynchronous: bool) -> None:
    """Compare a batch's answers with what the loop gives each of its requests alone."""
    model = case.make()
    prompts = [prompt_of(3 + 17 * i, seed=i) for i in range(len(wanted))]
    options = case.options | {"max_model_len": 192, "async_scheduling": is_asynchronous}
    with TracedEngine(model.save(folder), max_num_seqs=4, **options) as engine:
        outputs = engine.outputs(prompts, [one.sampling_params() for one in wanted])
    for prompt, one, output in zip(prompts, wanted, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == expected(case, model, prompt, one).tokens, one


@pytest.mark.parametrize("is_asynchronous", ASYNCHRONOUS_OFTEN)
@pytest.mark.parametrize("name", MDLM | BD3LM)
def test_tokens(tmp_path: Path, name: str, is_asynchronous: bool) -> None:
    """Answers of any length have the tokens of MDLM's loop, and on other bodies those of BD3LM's
    with the blocks of the Qwen3 body, in one batch.
    """
    random = [Wanted(max_tokens=30, strategy="random", seed=6)] if name in MDLM else []
    assert_loops((MDLM | BD3LM)[name], tmp_path, [*WANTED, *random], is_asynchronous)
