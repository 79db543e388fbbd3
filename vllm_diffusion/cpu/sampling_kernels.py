"""NumPy in place of the kernels that sample tokens: interpreted, they are most of a small step.

As in :mod:`vllm_diffusion.cpu.kernels`, each function does what one launch of the kernel of the
same name does, with the kernel's own noise: a seeded request reads the same. Numbers are added in
the kernels' order, in blocks of as many, so that they round alike. Two kernels do not run
interpreted at all: that of ``top_k`` and ``top_p``, which vLLM's PyTorch function replaces, and the
one that counts NaNs.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vllm_diffusion.cpu.launches import Functions, Launch

_SAMPLE = "vllm.v1.worker.gpu.sample."

# Floats in the dtype of what they were made from, integers in that which their use needs.
Floats = NDArray[Any]
Ints = NDArray[Any]

# Logits that are looked at at a time for log-probabilities: vLLM has those of 1,024 tokens of a
# prompt, and what is computed of them should not take as much again.
_LOGITS_AT_A_TIME = 1 << 22

# Keeps the noise of drafts apart from that of what verifies them.
_DRAFT_NOISE_SALT = 1 << 30


def _murmur3_mix(h: Ints, key: Ints) -> Ints:
    key = key * np.uint32(0xCC9E2D51)
    key = (key << np.uint32(15)) | (key >> np.uint32(17))
    h = h ^ (key * np.uint32(0x1B873593))
    h = (h << np.uint32(13)) | (h >> np.uint32(19))
    return h * np.uint32(5) + np.uint32(0xE6546B64)


def _murmur3(seeds: Ints, positions: Ints, tokens: Ints, domain: int = 0) -> Ints:
    """[num_rows, num_tokens], uint32: a hash of a row's seed and position and of the token."""
    h: Ints = np.full((len(seeds), 1), domain, np.uint32)
    for part in (seeds, seeds >> 32, positions):
        h = _murmur3_mix(h, (part & 0xFFFFFFFF).astype(np.uint32)[:, None])
    h = _murmur3_mix(h, tokens.astype(np.uint32)[None]) ^ np.uint32(16)
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x85EBCA6B)
    h ^= h >> np.uint32(13)
    h *= np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def _gumbel(seeds: Ints, positions: Ints, num_tokens: int, use_fp64: bool) -> Floats:
    """[num_rows, num_tokens]: noise of the tokens, each a function of seed, position and token."""
    tokens = np.arange(num_tokens)
    hashed = _murmur3(seeds, positions, tokens)
    if use_fp64:
        high = _murmur3(seeds, positions, tokens, 0x9E3779B9).astype(np.uint64)
        bits = ((high << np.uint64(32)) | hashed) >> np.uint64(11)
        uniform64 = (bits.astype(np.float64) + 0.5) * 2.0**-53
        uniform64 = np.where(uniform64 == 1.0, uniform64 - 2.0**-53, uniform64)
        return -np.log(-np.log(uniform64))
    high32 = (hashed >> np.uint32(16)).astype(np.float32)
    low32 = (hashed & np.uint32(0xFFFF)).astype(np.float32)
    uniform = high32 * np.float32(2.0**-16) + (low32 + np.float32(0.5)) * np.float32(2.0**-32)
    series = np.full_like(uniform, 1 / 8)
    for divisor in range(7, 0, -1):
        series = np.float32(1 / divisor) + uniform * series
    direct = np.log(np.maximum(np.float32(1) - uniform, np.float32(2.0**-24)))
    return -np.log(-np.where(uniform < np.float32(0.25), -uniform * series, direct))


def in_blocks(rows: Floats, block_size: int, fill: float) -> Floats:
    """[num_rows, num_blocks, block_size]: ``rows`` [num_rows, num_tokens], the last block filled
    up.
    """
    num_blocks = -(-rows.shape[-1] // block_size)
    blocks = np.full((len(rows), num_blocks * block_size), fill, rows.dtype)
    blocks[:, : rows.shape[-1]] = rows
    return blocks.reshape(len(rows), num_blocks, block_size)


def block_argmax(rows: Floats, block_size: int) -> tuple[Ints, Floats]:
    """[num_rows, num_blocks], twice: the token of each block's maximum, and the maximum."""
    blocks = in_blocks(rows, block_size, -np.inf)
    # A NaN is never chosen.
    idx = np.where(np.isnan(blocks), -np.inf, blocks).argmax(axis=-1)
    values = np.take_along_axis(blocks, idx[..., None], axis=-1)[..., 0]
    return idx + np.arange(blocks.shape[1]) * block_size, values


def noised(
    logits: Floats, seeds: Ints, positions: Ints, temperatures: Floats, use_fp64: bool
) -> Floats:
    """[num_rows, num_tokens]: ``logits`` with noise where a row's temperature is not 0."""
    rows: Floats = logits.astype(np.float64 if use_fp64 else np.float32)
    drawn = temperatures != 0
    if drawn.any():
        rows[drawn] += _gumbel(seeds[drawn], positions[drawn], logits.shape[1], use_fp64)
    return rows


def temperature(of: Launch) -> None:
    """Divide each row by its request's temperature."""
    of_row = of.temperature[of.expanded_idx_mapping].float()
    of.logits /= of_row.where(of_row != 0, 1.0)[:, None].to(of.logits.dtype)


def gumbel_sample(of: Launch) -> None:
    """Each block's likeliest token under Gumbel noise; the logits are kept where drafts are
    verified.
    """
    requests = of.expanded_idx_mapping.long()
    valid = requests >= 0
    slots = requests.clamp(min=0)
    temperatures = of.temp[slots].float().where(valid, 0.0).numpy()
    row_seeds = of.seeds[slots].where(valid, 0).numpy()
    positions = of.pos.numpy() + (_DRAFT_NOISE_SALT if of.IS_DRAFTING else 0)
    if of.logits_cache is not None:
        columns = of.logits_cache_col.long().expand(len(requests))
        kept = of.logits_cache_source[valid, : of.vocab_size]
        of.logits_cache[requests[valid], columns[valid], : of.vocab_size] = kept
        row_seeds = row_seeds ^ (columns.numpy() << 32)
    rows = of.logits[:, : of.vocab_size].float().numpy()
    if of.APPLY_TEMPERATURE:
        rows = rows / np.where(temperatures == 0, np.float32(1), temperatures)[:, None]
    rows = noised(rows, row_seeds, positions, temperatures, of.USE_FP64)
    of.local_argmax.numpy()[:], of.local_max.numpy()[:] = block_argmax(rows, of.BLOCK_SIZE)


def bias(of: Launch) -> None:
    """Apply each row's allowed tokens and biases, and mask end tokens before its minimum length."""
    slots = of.expanded_idx_mapping.long()
    counts = (of.num_allowed_token_ids, of.num_logit_bias, of.num_stop_token_ids)
    listed = zip(*(count[slots].tolist() for count in counts), strict=True)
    is_short = (of.pos + 1 < of.min_lens[slots]).tolist()
    for row, (slot, (num_allowed, num_biased, num_stops)) in enumerate(
        zip(slots.tolist(), listed, strict=True)
    ):
        values = of.logits[row, : of.vocab_size]
        if num_allowed:
            allowed = of.allowed_token_ids[slot, :num_allowed].long()
            kept = values[allowed]
            values.fill_(float("-inf"))
            values[allowed] = kept
        if num_biased:
            values[of.bias_token_ids[slot, :num_biased].long()] += of.bias[slot, :num_biased]
        if num_stops and is_short[row]:
            stops = of.stop_token_ids[slot, :num_stops].long()
            kept = values[stops]
            values[stops] = float("-inf")
            restores = of.CHECK_ALL_MASKED_ROWS and bool(of.restore_when_all_masked[slot])
            if restores and not bool((values > float("-inf")).any()):
                # Nothing else is left to say.
                values[stops] = kept.where(kept.isfinite(), values[stops])


def topk_topp(of: Launch) -> None:
    """Mask what ``top_k`` and ``top_p`` of each row exclude, in place."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    # It writes this value, and into the logits that it is given.
    assert np.isneginf(of.MASK_VALUE)
    top_k, top_p = of.K if of.TOPK_ENABLED else None, of.P if of.TOPP_ENABLED else None
    apply_top_k_top_p_pytorch(of.LOGITS, top_k, top_p, allow_cpu_sync=True)


def _some_rows(logits: Tensor, vocab_size: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield as many rows of ``logits`` [num_rows, vocab_size] as may be looked at together, and
    which.
    """
    num_rows = max(1, _LOGITS_AT_A_TIME // vocab_size)
    for first in range(0, len(logits), num_rows):
        rows = slice(first, first + num_rows)
        yield rows, logits[rows, :vocab_size]


def topk_log_softmax(of: Launch) -> None:
    """Compute log-probabilities of the tokens that each row lists."""
    # The kernel's divisions and logarithms are silent too.
    with np.errstate(all="ignore"):
        for rows, some in _some_rows(of.logits, of.vocab_size):
            values = some.float().numpy()
            # A NaN is not a maximum.
            maxima = np.fmax.reduce(values, axis=1, keepdims=True)
            sums = np.zeros(len(values), np.float32)
            exponentials = np.exp(values - maxima)
            for block in np.moveaxis(in_blocks(exponentials, of.BLOCK_SIZE, 0.0), 1, 0):
                sums += block.sum(axis=-1)
            listed = np.take_along_axis(values, of.topk_ids[rows].numpy(), axis=1)
            of.output.numpy()[rows] = listed - maxima - np.log(sums)[:, None]


def ranks(of: Launch) -> None:
    """Count the tokens of each row that are at least as likely as the one that it names.

    For a token of logit minus infinity the kernel also counts what it loads after the vocabulary.
    """
    for rows, some in _some_rows(of.logits, of.vocab_size):
        of.output[rows] = (some >= some.gather(1, of.token_ids[rows, None].long())).sum(dim=1)


def prompt_logprobs_token_ids(of: Launch) -> None:
    """Gather the token that follows each row's in its sequence."""
    starts = of.query_start_loc.tolist()
    for row, request in enumerate(of.idx_mapping.tolist()):
        first, end = starts[row], starts[row + 1]
        following = int(of.num_computed_tokens[request]) + 1
        # Where a sequence is as long as a model's may be, nothing follows the last row, which
        # nobody reads.
        tokens = of.all_token_ids[request, following : following + end - first]
        of.prompt_logprobs_token_ids[first:end] = 0
        of.prompt_logprobs_token_ids[first : first + len(tokens)] = tokens


def num_nans(of: Launch) -> None:
    """Count the NaNs of each row, for ``VLLM_COMPUTE_NANS_IN_LOGITS``."""
    of.num_nans[:] = of.logits.isnan().sum(dim=1)


OVERRIDES: dict[str, Functions] = {
    _SAMPLE + "logit_bias._bias_kernel": (bias,),
    _SAMPLE + "gumbel._temperature_kernel": (temperature,),
    _SAMPLE + "gumbel._gumbel_sample_kernel": (gumbel_sample,),
    _SAMPLE + "logprob._topk_log_softmax_kernel": (topk_log_softmax,),
    _SAMPLE + "logprob._ranks_kernel": (ranks,),
    _SAMPLE + "prompt_logprob._prompt_logprobs_token_ids_kernel": (prompt_logprobs_token_ids,),
    "vllm.v1.worker.gpu.metrics.logits._num_nans_kernel": (num_nans,),
    "vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel": (topk_topp,),
}
