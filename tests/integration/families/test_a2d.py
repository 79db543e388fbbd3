"""A2D's BD3LM and MDLM and their bodies give the tokens of the publisher's loops."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.engines.engine import ASYNCHRONOUS_OFTEN, TracedEngine, tokens_of
from tests.support.families import makers as tiny
from tests.support.families.cases import CASES, Case, Wanted, assert_loops, expected, mdlm_case
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


def serve_and_compare(
    case: Case, folder: Path, wanted: list[Wanted], is_asynchronous: bool
) -> None:
    """Compare a batch's answers with what the loop gives each of its requests alone."""
    model = case.make()
    prompts = [prompt_of(3 + 17 * i, seed=i) for i in range(len(wanted))]
    options = case.options | {"max_model_len": 192, "async_scheduling": is_asynchronous}
    with TracedEngine(model.save(folder), max_num_seqs=4, **options) as engine:
        outputs = engine.outputs(prompts, [one.sampling_params() for one in wanted])
    assert_loops(case, model, prompts, wanted, tokens_of(outputs))


@pytest.mark.parametrize("is_asynchronous", ASYNCHRONOUS_OFTEN)
@pytest.mark.parametrize("name", MDLM | BD3LM)
def test_tokens(tmp_path: Path, name: str, is_asynchronous: bool) -> None:
    """Answers of any length have the tokens of MDLM's loop, and on other bodies those of BD3LM's
    with the blocks of the Qwen3 body, in one batch.
    """
    random = [Wanted(max_tokens=30, strategy="random", seed=6)] if name in MDLM else []
    serve_and_compare((MDLM | BD3LM)[name], tmp_path, [*WANTED, *random], is_asynchronous)


@pytest.mark.parametrize("is_asynchronous", ASYNCHRONOUS_OFTEN)
def test_shared_prefixes(tmp_path: Path, is_asynchronous: bool) -> None:
    """Prompts of BD3LM share whole blocks only if their lengths have the same remainder."""
    case = CASES["a2d"]
    model = case.make()
    first = prompt_of(100, seed=1)
    wanted = Wanted(max_tokens=40)
    options = {"max_model_len": 512, "async_scheduling": is_asynchronous}
    with TracedEngine(model.save(tmp_path), **case.options, **options) as engine:
        size = engine.scheduler.hash_block_size

        def cached(prompt: list[int], **changes: object) -> int:
            """Return a prompt's number of cached tokens; check its answer."""
            asked = {"prompt_token_ids": prompt, **changes}
            outputs = engine.llm.generate([asked], wanted.sampling_params(), use_tqdm=False)
            assert_loops(case, model, [prompt], [wanted], tokens_of(outputs))
            return int(outputs[0].num_cached_tokens)

        assert cached(first) == 0
        answer = expected(case, model, first, wanted).tokens
        # The first block is of 4 tokens, and three of 32 follow it.
        for num_shared in (100, 99, 70, 67, 40, 35, 20):
            prompt = first[:num_shared] + prompt_of(132 - num_shared, seed=num_shared + 7)
            whole = 4 + (num_shared - 4) // 32 * 32
            assert cached(prompt) == whole // size * size, num_shared
        for length in (99, 101, 130, 134):
            assert cached(first[:60] + prompt_of(length - 60, seed=length)) == 0, length
        assert cached(first, cache_salt="another") == 0
        # A turn later, of what was said only blocks that were whole: the last of 40 tokens was not.
        assert cached(first + answer + prompt_of(24, seed=3)) == 132 // size * size
