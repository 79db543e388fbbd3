"""Tests of the hashes of cache blocks, against what their keys and values depend on."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.decoding.layouts import BlockAfterPrompt

pytestmark = pytest.mark.engine


def hashed(prompt: list[int], answer: list[int], salt: str | None, sizes: tuple[int, int]) -> Any:
    """Return a request with its answer, which is appended a block of the model at a time."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.request import Request

    from vllm_diffusion.scheduling.prefix_hashes import PrefixHashes

    init_none_hash(sha256)
    length, cache_block = sizes
    cache: Any = SimpleNamespace(prefix_caching_hash_algo="sha256")
    request = Request("a", prompt, SamplingParams(max_tokens=99), None, cache_salt=salt)
    PrefixHashes(BlockAfterPrompt(length), cache, cache_block).install(request)
    for start in range(0, len(answer), length):
        request.append_output_token_ids(answer[start : start + length])
    return request


def needed_of(num_prompt: int, end: int, length: int) -> int:
    """Return the end of the model's block that has the last position before ``end``."""
    block_end = num_prompt % length
    while block_end < end:
        block_end += length
    return block_end


@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    prompts=st.tuples(*[st.lists(st.integers(0, 1), min_size=1, max_size=14)] * 2),
    answers=st.tuples(*[st.lists(st.integers(0, 1), max_size=9)] * 2),
    salts=st.tuples(*[st.sampled_from([None, None, "a"])] * 2),
)
def test_equal_hashes(sizes: Any, prompts: Any, answers: Any, salts: Any) -> None:
    """Hashes are equal exactly where all that the keys and values depend on is equal."""
    length, cache_block = sizes
    requests = [hashed(*each, sizes) for each in zip(prompts, answers, salts, strict=True)]
    for request, prompt, answer in zip(requests, prompts, answers, strict=True):
        tokens = prompt + answer
        ends = range(cache_block, len(tokens) + 1, cache_block)
        known = [end for end in ends if needed_of(len(prompt), end, length) <= len(tokens)]
        assert len(request.block_hashes) == len(known)
    for i, pair in enumerate(zip(*(request.block_hashes for request in requests), strict=False)):
        end = (i + 1) * cache_block
        seen = []
        for prompt, answer, salt in zip(prompts, answers, salts, strict=True):
            needed = needed_of(len(prompt), end, length)
            seen.append((salt, needed, (prompt + answer)[:needed]))
        assert (pair[0] == pair[1]) == (seen[0] == seen[1])
