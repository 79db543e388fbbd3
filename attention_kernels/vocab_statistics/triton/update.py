"""Statistics of a tile of logits.

One program per row walks over its tile twice: first for the maximum, then, with the exponentials
relative to it, for sums, weights and the Gumbel-max candidate. The tile has just been written by a
matrix product and the second walk finds it in cache; nothing of the size of the tile is written
except the weights. Where the maximum rose, which it does in a few of many tiles, the row's sums of
earlier tiles are brought down to it, among them the row of ``product``.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

import math

import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.noise import LARGEST_NOISE, SMALLEST_NOISE
from attention_kernels.vocab_statistics.logits import RowLogits
from attention_kernels.vocab_statistics.running import RowDraws, RunningStatistics
from attention_kernels.vocab_statistics.triton.logits import (
    aligned_draws,
    capped,
    gumbel,
    gumbel_bound,
    kernel_rows,
    load_uniform,
    load_x,
)

# Chosen without a GPU: 64 registers a thread where nobody adjusts anything, which leaves room for
# four programs a multiprocessor; twice the width spills. Adjustments spill on some chips with 64
# (test_ahead_of_time.py). One width for both, so that a neighbour with a bias does
# not change how a row is summed.
BLOCK, NUM_WARPS = 1024, 8
REGISTERS, REGISTERS_OF_ADJUSTED = 64, 80
# Blocks that are read together where only a maximum is kept of an id.
WIDER = 4
_WIDER = tl.constexpr(WIDER)
_NO_ID = tl.constexpr(2**31 - 1)
# exp(-104) is 0 in float32.
_ONE_OVER_LOG_2 = tl.constexpr(1 / math.log(2))
_NOWHERE = tl.constexpr(-200.0)
_LARGEST_NOISE, _SMALLEST_NOISE = tl.constexpr(LARGEST_NOISE), tl.constexpr(SMALLEST_NOISE)


@triton.jit
def _update_statistics_kernel(
    rows,
    draws,
    maximum_ptr,
    total_ptr,
    weighted_ptr,
    argmax_ptr,
    best_ptr,
    candidate_ptr,
    drawn_ptr,
    weights_ptr,
    weights_stride,
    product_ptr,
    product_stride,
    hidden_size,
    B: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    inverse = 1.0 / tl.load(draws.temperature + row)
    ids = tl.arange(0, B)

    WIDE: tl.constexpr = B if rows.tables is not None else _WIDER * B
    wide_ids = tl.arange(0, WIDE)
    top = tl.full([WIDE], float("-inf"), tl.float32)
    for start in range(0, rows.num_ids, WIDE):
        if rows.tables is not None:
            x = load_x(rows, row, start + wide_ids, inverse)
        else:
            offset = start + wide_ids
            at = rows.projected + row * rows.stride + offset
            x = tl.load(at, mask=offset < rows.num_ids, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, x)
    tile_maximum = tl.max(top, axis=0)
    if rows.tables is None:
        # The largest before the cap is the largest after it.
        tile_maximum = capped(tile_maximum, rows.softcap) * inverse

    before = tl.load(maximum_ptr + row)
    maximum = tl.maximum(before, tile_maximum)
    # As long as nothing is possible, anything finite will do.
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    fall = tl.where(before == float("-inf"), 0.0, before - shift)
    rescale = tl.exp(fall)

    request_temperature = tl.load(draws.request_temperature + row)
    is_greedy = request_temperature == 0.0
    inverse_rate = 1.0 / tl.where(is_greedy, 1.0, request_temperature)
    most_noise = tl.where(is_greedy, 0.0, _LARGEST_NOISE)
    least_noise = tl.where(is_greedy, 0.0, _SMALLEST_NOISE)
    highest, best = before, tl.load(best_ptr + row)
    # A score that some id has reached for certain.
    reached = tl.maximum(best, tile_maximum * inverse_rate + least_noise)
    total = tl.zeros([B], tl.float32)
    weighted = tl.zeros([B], tl.float32)
    for start in range(0, rows.num_ids, B):
        x = load_x(rows, row, start + ids, inverse)
        # 0 * -inf is not a number, where the limit is 0: below this every exponential is 0.
        distance = tl.maximum(x - shift, _NOWHERE)
        exponential = tl.exp2(distance * _ONE_OVER_LOG_2)
        total += exponential
        weighted += exponential * distance
        if weights_ptr is not None:
            tl.store(
                weights_ptr + row * weights_stride + start + ids,
                exponential.to(weights_ptr.dtype.element_ty),
                mask=start + ids < rows.num_ids,
            )
        block_maximum = tl.max(x, axis=0)
        if block_maximum > highest:
            highest = block_maximum
            first = tl.min(tl.where(x == block_maximum, start + ids, _NO_ID), axis=0)
            tl.store(argmax_ptr + row, (rows.first_id + first).to(tl.int64))
        # Noise is most of the work here. Most blocks of a peaked row cannot win with any, and most
        # of a flat one not with theirs, which its random numbers tell before their logarithms.
        if block_maximum * inverse_rate + most_noise >= reached:
            v = load_uniform(draws, row, rows.first_id + start, B)
            bound = x * inverse_rate + tl.where(is_greedy, 0.0, gumbel_bound(v))
            if tl.max(bound, axis=0) >= reached:
                score = x * inverse_rate + tl.where(is_greedy, 0.0, gumbel(v))
                block_best = tl.max(score, axis=0)
                reached = tl.maximum(reached, block_best)
                if block_best > best:
                    best = block_best
                    winner = tl.min(tl.where(score == block_best, start + ids, _NO_ID), axis=0)
                    drawn = tl.max(tl.where(start + ids == winner, x, float("-inf")), axis=0)
                    tl.store(candidate_ptr + row, (rows.first_id + winner).to(tl.int64))
                    tl.store(drawn_ptr + row, drawn)

    old_total = tl.load(total_ptr + row)
    old_weighted = tl.load(weighted_ptr + row)
    tl.store(
        weighted_ptr + row,
        rescale * (old_weighted + old_total * fall) + tl.sum(weighted, axis=0),
    )
    tl.store(total_ptr + row, rescale * old_total + tl.sum(total, axis=0))
    tl.store(maximum_ptr + row, maximum)
    tl.store(best_ptr + row, best)
    # The first of these is decided when the kernel is compiled, the second when it runs.
    if product_ptr is not None:  # noqa: SIM102
        if rescale != 1.0:
            for start in range(0, hidden_size, B):
                inside = start + ids < hidden_size
                element = product_ptr + row * product_stride + start + ids
                tl.store(element, tl.load(element, mask=inside, other=0.0) * rescale, mask=inside)


def update_statistics(
    running: RunningStatistics,
    rows: RowLogits,
    draws: RowDraws,
    weights: Tensor | None,
    product: Tensor | None,
) -> None:
    for name, tensor in (("weights", weights), ("product", product)):
        if tensor is not None and tensor.stride(1) != 1:
            raise ValueError(f"The last dimension of {name} must be contiguous.")
    _update_statistics_kernel[(running.maximum.shape[0],)](
        kernel_rows(rows),
        aligned_draws(draws),
        running.maximum,
        running.total,
        running.weighted,
        running.argmax,
        running.best,
        running.candidate,
        running.drawn,
        weights,
        0 if weights is None else weights.stride(0),
        product,
        0 if product is None else product.stride(0),
        0 if product is None else product.shape[1],
        B=BLOCK,
        num_warps=NUM_WARPS,
        maxnreg=REGISTERS if rows.adjustments is None else REGISTERS_OF_ADJUSTED,
    )
