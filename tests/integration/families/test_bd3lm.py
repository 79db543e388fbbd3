"""Tests of what prompts of A2D's BD3LM share in the cache, which depends on their lengths."""

from pathlib import Path

import pytest

from tests.support.engines.engine import ASYNCHRONOUS_OFTEN, TracedEngine
from tests.support.families.cases import CASES, Wanted, expected
from tests.support.families.model import prompt_of

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("is_asynchronous", ASYNCHRONOUS_OFTEN)
def test_shared_prefixes(tmp_path: Path, is_asynchronous: bool) -> None:
    """Prompts share whole blocks only if their lengths have the same remainder."""
    case = CASES["a2d"]
    model = case.make()
    first = prompt_of(100, seed=1)
    wanted = Wanted(max_tokens=40)
    options = {"max_model_len": 512, "async_scheduling": is_asynchronous}
    with TracedEngine(model.save(tmp_path), **case.options, **options) as engine:
        size = engine.scheduler.hash_block_size

        def cached(prompt: list[int], **changes: object) -> int:
            """Return a prompt's number of cached tokens; check its answer."""
            from vllm.inputs import TokensPrompt

            asked = TokensPrompt(prompt_token_ids=prompt, **changes)
            params = wanted.sampling_params()
            (output,) = engine.llm.generate([asked], params, use_tqdm=False)
            found = list(output.outputs[0].token_ids)
            assert found == expected(case, model, prompt, wanted).tokens, len(prompt)
            return int(output.num_cached_tokens)

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
