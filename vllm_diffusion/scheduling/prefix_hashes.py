"""Hashes of cache blocks that may end within a block of the model.

Tokens of a block attend to one another, so keys and values depend on all tokens of their block.
vLLM's hash of a cache block holds the tokens up to its end, which is not enough where blocks are
counted from the end of the prompt: the rest of the last block, and where blocks begin, belong to
it.
"""

from collections.abc import Sequence

import torch
from vllm.config import CacheConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    hash_block_tokens,
)
from vllm.v1.request import Request

from vllm_diffusion.decoding.layouts import CanvasLayout


class PrefixHashes:
    """What vLLM's requests call to hash the cache blocks that are new."""

    def __init__(self, layout: CanvasLayout, cache_config: CacheConfig, block_size: int) -> None:
        """Bind them to an engine.

        Args:
            layout: Layout of canvases.
            cache_config: vLLM's.
            block_size: Tokens of a cache block.
        """
        self._layout = layout
        self._hash = get_hash_fn_by_name(cache_config.prefix_caching_hash_algo)
        self._block_size = block_size

    def install(self, request: Request) -> None:
        """Hash a request's blocks by this, from the first one on."""
        request._block_hasher = self
        request.block_hashes.clear()
        request.update_block_hashes()

    def __call__(self, request: Request) -> list[BlockHash]:
        """Return the hashes of cache blocks whose keys and values depend on known tokens alone."""
        size, tokens = self._block_size, request.all_token_ids
        first_block = len(request.block_hashes)
        new: list[BlockHash] = []
        needed = self._num_needed(request, first_block, len(tokens) // size)
        for i, num_needed in enumerate(needed, first_block):
            if num_needed > len(tokens):
                break
            start, end = i * size, (i + 1) * size
            # Include pictures: their tokens are all the same.
            extra, _ = generate_block_hash_extra_keys(request, start, num_needed, 0)
            parent = new[-1] if new else request.block_hashes[-1] if i else None
            # The number of tokens too: where this block of the model ends says where all others do.
            after = (num_needed, *tokens[end:num_needed])
            new.append(hash_block_tokens(self._hash, parent, tokens[start:end], (extra, *after)))
        return new

    def _num_needed(self, request: Request, first: int, end: int) -> Sequence[int]:
        """Return how many leading tokens the keys and values of cache blocks depend on.

        Args:
            request: The request.
            first: The first cache block.
            end: The cache block after the last one.
        """
        last = torch.arange(first + 1, end + 1) * self._block_size - 1
        spans = torch.zeros(len(last), 2, dtype=torch.int32)
        num_prompt = request.num_prompt_tokens
        self._layout.row_spans(last, spans, lambda: torch.full_like(last, num_prompt))
        numbers: list[int] = spans[:, 1].tolist()
        return numbers
