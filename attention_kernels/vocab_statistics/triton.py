"""Statistics of a tile of logits, in Triton.

One program per row walks over its tile twice: first for the maximum, then, with the exponentials
relative to it, for sums, weights and the Gumbel-max candidate. The tile has just been written by a
matrix product and the second walk finds it in cache; nothing of the size of the tile is written
except the weights. Noise is made in registers: one Philox counter gives the words of four ids.

Legend: B ids at a time; x is a logit, capped, over the schedule's temperature.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.noise import Purpose
from attention_kernels.vocab_statistics.running import RowDraws, RunningStatistics

# Chosen without a GPU: at most 60 registers a thread on every chip, which leaves room for four
# programs a multiprocessor; twice the width spills (test_vocab_statistics_ahead_of_time.py).
BLOCK = 1024
NUM_WARPS = 8
_CANDIDATE = tl.constexpr(int(Purpose.CANDIDATE) << 24)
_NO_ID = tl.constexpr(2**31 - 1)


@triton.jit
def _load_x(logits_ptr, offset, num_ids, softcap, temperature, HAS_SOFTCAP: tl.constexpr):
    inside = offset < num_ids
    x = tl.load(logits_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if HAS_SOFTCAP:
        # tanh(y) = 1 - 2 / (exp(2y) + 1), which is right at both ends.
        x = softcap * (1.0 - 2.0 / (tl.exp(2.0 * x / softcap) + 1.0))
    return tl.where(inside, x / temperature, float("-inf"))


@triton.jit
def _gumbel(word):
    """As ``attention_kernels.noise.gumbel_noise``."""
    v = tl.minimum(
        (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-8
    )
    # -log(1 - v): a logarithm near 1 is only good to an absolute error, and small v decide.
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * (0.25 + v * 0.2))))
    exponential = tl.where(v < 0.015625, series, -tl.log(1.0 - v))
    return -tl.log(exponential)


@triton.jit
def _noise(seed, group, position, step, canvas_idx, B: tl.constexpr):
    """[B] Gumbel noise of the ids in ``group`` [B / 4]."""
    w0, w1, w2, w3 = tl.philox(
        seed,
        group.to(tl.uint32),
        position.to(tl.uint32),
        (step | _CANDIDATE).to(tl.uint32),
        canvas_idx.to(tl.uint32),
    )
    # Flattened row by row this is w0, w1, w2, w3 of the first group, and so on.
    return _gumbel(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [B]))


@triton.jit
def _update_statistics_kernel(
    logits_ptr,
    logits_stride,
    num_ids,
    first_id,
    softcap,
    temperature_ptr,
    request_temperature_ptr,
    seed_ptr,
    canvas_idx_ptr,
    step_ptr,
    position_ptr,
    maximum_ptr,
    total_ptr,
    weighted_ptr,
    argmax_ptr,
    best_ptr,
    candidate_ptr,
    rescale_ptr,
    weights_ptr,
    weights_stride,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * logits_stride
    temperature = tl.load(temperature_ptr + row)
    ids = tl.arange(0, B)

    top = tl.full([B], float("-inf"), tl.float32)
    top_id = tl.full([B], _NO_ID, tl.int32)
    for start in range(0, num_ids, B):
        x = _load_x(logits_ptr, start + ids, num_ids, softcap, temperature, HAS_SOFTCAP)
        higher = x > top
        top = tl.where(higher, x, top)
        top_id = tl.where(higher, start + ids, top_id)
    tile_maximum = tl.max(top, axis=0)
    tile_argmax = tl.min(tl.where(top == tile_maximum, top_id, _NO_ID), axis=0)

    before = tl.load(maximum_ptr + row)
    if tile_maximum > before:
        tl.store(argmax_ptr + row, (first_id + tile_argmax).to(tl.int64))
    maximum = tl.maximum(before, tile_maximum)
    # As long as nothing is possible, anything finite will do.
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    fall = tl.where(before == float("-inf"), 0.0, before - shift)
    rescale = tl.exp(fall)

    request_temperature = tl.load(request_temperature_ptr + row)
    greedy = request_temperature == 0.0
    divisor = tl.where(greedy, 1.0, request_temperature)
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row)
    step = tl.load(step_ptr + row)
    canvas_idx = tl.load(canvas_idx_ptr + row)
    groups = tl.arange(0, B // 4)

    total = tl.zeros([B], tl.float32)
    weighted = tl.zeros([B], tl.float32)
    best = tl.full([B], float("-inf"), tl.float32)
    best_id = tl.full([B], _NO_ID, tl.int32)
    for start in range(0, num_ids, B):
        x = _load_x(logits_ptr, start + ids, num_ids, softcap, temperature, HAS_SOFTCAP)
        distance = x - shift
        exponential = tl.exp(distance)
        total += exponential
        # 0 * -inf is not a number, where the limit is 0.
        weighted += tl.where(exponential > 0.0, exponential * distance, 0.0)
        if HAS_WEIGHTS:
            tl.store(
                weights_ptr + row * weights_stride + start + ids,
                exponential.to(weights_ptr.dtype.element_ty),
                mask=start + ids < num_ids,
            )
        noise = _noise(seed, (first_id + start) // 4 + groups, position, step, canvas_idx, B)
        score = x / divisor + tl.where(greedy, 0.0, noise)
        higher = score > best
        best = tl.where(higher, score, best)
        best_id = tl.where(higher, start + ids, best_id)

    old_total = tl.load(total_ptr + row)
    old_weighted = tl.load(weighted_ptr + row)
    tl.store(
        weighted_ptr + row,
        rescale * (old_weighted + old_total * fall) + tl.sum(weighted, axis=0),
    )
    tl.store(total_ptr + row, rescale * old_total + tl.sum(total, axis=0))
    tl.store(maximum_ptr + row, maximum)
    tl.store(rescale_ptr + row, rescale)
    tile_best = tl.max(best, axis=0)
    if tile_best > tl.load(best_ptr + row):
        winner = tl.min(tl.where(best == tile_best, best_id, _NO_ID), axis=0)
        tl.store(best_ptr + row, tile_best)
        tl.store(candidate_ptr + row, (first_id + winner).to(tl.int64))


def update_statistics_triton(
    running: RunningStatistics,
    logits: Tensor,
    first_id: int,
    draws: RowDraws,
    softcap: float | None,
    weights: Tensor | None,
) -> Tensor:
    if logits.stride(1) != 1 or (weights is not None and weights.stride(1) != 1):
        raise ValueError("The last dimension of logits and weights must be contiguous.")
    rescale = torch.empty_like(running.maximum)
    num_rows, num_ids = logits.shape
    _update_statistics_kernel[(num_rows,)](
        logits,
        logits.stride(0),
        num_ids,
        first_id,
        1.0 if softcap is None else softcap,
        *draws,
        running.maximum,
        running.total,
        running.weighted,
        running.argmax,
        running.best,
        running.candidate,
        rescale,
        weights,
        0 if weights is None else weights.stride(0),
        HAS_SOFTCAP=softcap is not None,
        HAS_WEIGHTS=weights is not None,
        B=BLOCK,
        num_warps=NUM_WARPS,
    )
    return rescale
