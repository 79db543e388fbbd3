"""Statistics of a tile of logits.

One program per row walks over its tile twice: first for the maximum, then, with the exponentials
relative to it, for sums, weights and the Gumbel-max candidate. The tile has just been written by a
matrix product and the second walk finds it in cache; nothing of the size of the tile is written
except the weights. Where the maximum rose, which it does in a few of many tiles, the row's sums of
earlier tiles are brought down to it, among them the row of ``product``.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.noise import LARGEST_NOISE, SMALLEST_NOISE
from attention_kernels.vocab_statistics.logits import RowLogits
from attention_kernels.vocab_statistics.running import RowDraws, RunningStatistics
from attention_kernels.vocab_statistics.triton.logits import (
    aligned_draws,
    kernel_rows,
    load_noise,
    load_x,
)

# Chosen without a GPU: 64 registers a thread where nobody adjusts anything, which leaves room for four
# programs a multiprocessor; twice the width spills. Adjustments spill on some chips with 64
# (test_vocab_statistics_ahead_of_time.py). One width for both, so that a neighbour with a bias does
# not change how a row is summed.
BLOCK, NUM_WARPS = 1024, 8
REGISTERS, REGISTERS_OF_ADJUSTED = 64, 80
_NO_ID = tl.constexpr(2**31 - 1)
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
    temperature = tl.load(draws.temperature + row)
    ids = tl.arange(0, B)

    top = tl.full([B], float("-inf"), tl.float32)
    top_id = tl.full([B], _NO_ID, tl.int32)
    for start in range(0, rows.num_ids, B):
        x = load_x(rows, row, start + ids, temperature)
        higher = x > top
        top = tl.where(higher, x, top)
        top_id = tl.where(higher, start + ids, top_id)
    tile_maximum = tl.max(top, axis=0)
    tile_argmax = tl.min(tl.where(top == tile_maximum, top_id, _NO_ID), axis=0)

    before = tl.load(maximum_ptr + row)
    if tile_maximum > before:
        tl.store(argmax_ptr + row, (rows.first_id + tile_argmax).to(tl.int64))
    maximum = tl.maximum(before, tile_maximum)
    # As long as nothing is possible, anything finite will do.
    shift = tl.where(maximum == float("-inf"), 0.0, maximum)
    fall = tl.where(before == float("-inf"), 0.0, before - shift)
    rescale = tl.exp(fall)

    request_temperature = tl.load(draws.request_temperature + row)
    rate = tl.where(request_temperature == 0.0, 1.0, request_temperature)
    total = tl.zeros([B], tl.float32)
    weighted = tl.zeros([B], tl.float32)
    # A score that some id has reached for certain, and the most that noise adds to one.
    is_greedy = request_temperature == 0.0
    most_noise = tl.where(is_greedy, 0.0, _LARGEST_NOISE)
    least_noise = tl.where(is_greedy, 0.0, _SMALLEST_NOISE)
    reached = tl.maximum(tl.load(best_ptr + row), tile_maximum / rate + least_noise)
    best = tl.full([B], float("-inf"), tl.float32)
    best_id = tl.full([B], _NO_ID, tl.int32)
    best_x = tl.full([B], float("-inf"), tl.float32)
    for start in range(0, rows.num_ids, B):
        x = load_x(rows, row, start + ids, temperature)
        distance = x - shift
        exponential = tl.exp(distance)
        total += exponential
        # 0 * -inf is not a number, where the limit is 0.
        weighted += tl.where(exponential > 0.0, exponential * distance, 0.0)
        if weights_ptr is not None:
            tl.store(
                weights_ptr + row * weights_stride + start + ids,
                exponential.to(weights_ptr.dtype.element_ty),
                mask=start + ids < rows.num_ids,
            )
        # Noise is most of the work here, and most blocks of a peaked row cannot win with any.
        if tl.max(x, axis=0) / rate + most_noise >= reached:
            score = x / rate + load_noise(draws, row, rows.first_id + start, B)
            higher = score > best
            best = tl.where(higher, score, best)
            best_id = tl.where(higher, start + ids, best_id)
            best_x = tl.where(higher, x, best_x)

    old_total = tl.load(total_ptr + row)
    old_weighted = tl.load(weighted_ptr + row)
    tl.store(
        weighted_ptr + row,
        rescale * (old_weighted + old_total * fall) + tl.sum(weighted, axis=0),
    )
    tl.store(total_ptr + row, rescale * old_total + tl.sum(total, axis=0))
    tl.store(maximum_ptr + row, maximum)
    tile_best = tl.max(best, axis=0)
    if tile_best > tl.load(best_ptr + row):
        winner = tl.min(tl.where(best == tile_best, best_id, _NO_ID), axis=0)
        tl.store(best_ptr + row, tile_best)
        tl.store(candidate_ptr + row, (rows.first_id + winner).to(tl.int64))
        drawn = tl.max(tl.where(best_id == winner, best_x, float("-inf")), axis=0)
        tl.store(drawn_ptr + row, drawn)
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
