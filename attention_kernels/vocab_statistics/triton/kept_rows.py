"""Sweeps over rows whose projected logits were kept whole.

A program takes ``SPAN`` ids of one row, so that a few rows fill the device as well as many; what
the programs of a row find is folded by a small operation of PyTorch, in the order of their ids.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.vocab_statistics.logits import MASS_SCALE, RowLogits
from attention_kernels.vocab_statistics.running import FilteredDraw, RowDraws
from attention_kernels.vocab_statistics.triton.logits import (
    aligned,
    aligned_draws,
    kernel_rows,
    load_noise,
    load_x,
    ordered_key,
)

# Chosen without a GPU: nothing spills on any chip (test_ahead_of_time.py).
SPAN = 8192
BLOCK, NUM_WARPS = 1024, 8
# Each id is compared with every pivot at once, which takes a register or two for each pair.
WEIGH_BLOCK, WEIGH_WARPS = 256, 4
# Left to itself, ptxas takes fewer for SM 12.0 and spills.
WEIGH_REGISTERS_OF_ADJUSTED = 128
_NO_ID = tl.constexpr(2**31 - 1)
_MASS_SCALE = tl.constexpr(MASS_SCALE)


@triton.jit
def _scaled_logits_kernel(
    rows,
    divisor_ptr,
    out_ptr,
    out_stride,
    SPAN: tl.constexpr,
    B: tl.constexpr,
):
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1) * SPAN
    inverse = 1.0 / tl.load(divisor_ptr + row)
    ids = tl.arange(0, B)
    for start in range(span, tl.minimum(span + SPAN, rows.num_ids), B):
        x = load_x(rows, row, start + ids, inverse)
        tl.store(out_ptr + row * out_stride + start + ids, x, mask=start + ids < rows.num_ids)


@triton.jit
def _largest_logit_kernel(
    rows,
    divisor_ptr,
    out_ptr,
    SPAN: tl.constexpr,
    B: tl.constexpr,
):
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1) * SPAN
    inverse = 1.0 / tl.load(divisor_ptr + row)
    ids = tl.arange(0, B)
    top = tl.full([B], float("-inf"), tl.float32)
    for start in range(span, tl.minimum(span + SPAN, rows.num_ids), B):
        x = load_x(rows, row, start + ids, inverse)
        top = tl.maximum(top, x)
    tl.store(out_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.max(top, axis=0))


@triton.jit
def _weigh_kernel(
    rows,
    divisor_ptr,
    maximum_ptr,
    pivots_ptr,
    bounds_ptr,
    out_ptr,
    BY_MASS: tl.constexpr,
    SPAN: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
):
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1) * SPAN
    low, high = tl.load(bounds_ptr + 2 * row), tl.load(bounds_ptr + 2 * row + 1)
    weights = tl.zeros([P], tl.int64)
    # A row that is settled is not read again.
    if high - low > 1:
        first, end = low.to(tl.int32), high.to(tl.int32)
        inverse, maximum = 1.0 / tl.load(divisor_ptr + row), tl.load(maximum_ptr + row)
        pivots = tl.load(pivots_ptr + row * P + tl.arange(0, P)).to(tl.int32)
        ids = tl.arange(0, B)
        for start in range(span, tl.minimum(span + SPAN, rows.num_ids), B):
            x = load_x(rows, row, start + ids, inverse)
            key = ordered_key(x)
            counted = (start + ids < rows.num_ids) & (key >= first) & (key < end)
            # After the first sweep most blocks hold nothing between the bounds.
            if tl.max(counted.to(tl.int32), axis=0) > 0:
                weight = counted.to(tl.int64)
                if BY_MASS:
                    share = tl.where(x == float("-inf"), 0.0, tl.exp(x - maximum))
                    weight *= (share * _MASS_SCALE).to(tl.int64)
                weights += tl.sum(
                    tl.where(key[:, None] >= pivots[None, :], weight[:, None], 0), axis=0
                )
    out = out_ptr + (row * tl.num_programs(1) + tl.program_id(1)) * P
    tl.store(out + tl.arange(0, P), weights)


@triton.jit
def _draw_kernel(
    rows,
    divisor_ptr,
    maximum_ptr,
    keys_ptr,
    draws,
    best_ptr,
    candidate_ptr,
    drawn_ptr,
    mass_ptr,
    SPAN: tl.constexpr,
    B: tl.constexpr,
):
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1) * SPAN
    inverse, least = 1.0 / tl.load(divisor_ptr + row), tl.load(keys_ptr + row).to(tl.int32)
    maximum = tl.load(maximum_ptr + row)
    ids = tl.arange(0, B)
    best = tl.full([B], float("-inf"), tl.float32)
    best_id = tl.full([B], _NO_ID, tl.int32)
    best_x = tl.full([B], float("-inf"), tl.float32)
    mass = tl.zeros([B], tl.float32)
    for start in range(span, tl.minimum(span + SPAN, rows.num_ids), B):
        x = load_x(rows, row, start + ids, inverse)
        kept = ordered_key(x) >= least
        # Most blocks hold nothing that a filter keeps, and need no noise.
        if tl.max(kept.to(tl.int32), axis=0) > 0:
            # An id that no threshold keeps is as one that is impossible.
            x = tl.where(kept, x, float("-inf"))
            mass += tl.where(x == float("-inf"), 0.0, tl.exp(x - maximum))
            score = x + load_noise(draws, row, rows.first_id + start, B)
            higher = score > best
            best = tl.where(higher, score, best)
            best_id = tl.where(higher, start + ids, best_id)
            best_x = tl.where(higher, x, best_x)
    top = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == top, best_id, _NO_ID), axis=0)
    out = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + out, top)
    # Where nothing is possible the id is never used, but it is an id.
    candidate = tl.where(top == float("-inf"), 0, rows.first_id + winner)
    tl.store(candidate_ptr + out, candidate.to(tl.int64))
    drawn = tl.max(tl.where(best_id == winner, best_x, float("-inf")), axis=0)
    tl.store(drawn_ptr + out, drawn)
    tl.store(mass_ptr + out, tl.sum(mass, axis=0))


def scaled_logits(rows: RowLogits, divisor: Tensor) -> Tensor:
    out = torch.empty(rows.projected.shape, dtype=torch.float32, device=divisor.device)
    _scaled_logits_kernel[_grid(rows)](
        kernel_rows(rows),
        aligned(divisor),
        out,
        out.stride(0),
        SPAN=SPAN,
        B=BLOCK,
        num_warps=NUM_WARPS,
    )
    return out


def largest_logit(rows: RowLogits, divisor: Tensor) -> Tensor:
    out = torch.empty(_grid(rows), dtype=torch.float32, device=divisor.device)
    _largest_logit_kernel[_grid(rows)](
        kernel_rows(rows), aligned(divisor), out, SPAN=SPAN, B=BLOCK, num_warps=NUM_WARPS
    )
    return out.amax(dim=1)


def weigh(
    rows: RowLogits,
    divisor: Tensor,
    maximum: Tensor,
    pivots: Tensor,
    bounds: Tensor,
    by_mass: bool,
) -> Tensor:
    num_pivots = pivots.shape[1]
    out = torch.empty(*_grid(rows), num_pivots, dtype=torch.int64, device=divisor.device)
    _weigh_kernel[_grid(rows)](
        kernel_rows(rows),
        aligned(divisor),
        maximum,
        pivots.contiguous(),
        bounds.contiguous(),
        out,
        BY_MASS=by_mass,
        SPAN=SPAN,
        P=num_pivots,
        B=WEIGH_BLOCK,
        num_warps=WEIGH_WARPS,
        maxnreg=None if rows.adjustments is None else WEIGH_REGISTERS_OF_ADJUSTED,
    )
    return out.sum(dim=1)


def draw(
    rows: RowLogits, divisor: Tensor, maximum: Tensor, keys: Tensor, draws: RowDraws
) -> FilteredDraw:
    best = torch.empty(_grid(rows), dtype=torch.float32, device=divisor.device)
    drawn, mass = torch.empty_like(best), torch.empty_like(best)
    candidate = torch.empty(_grid(rows), dtype=torch.int64, device=divisor.device)
    _draw_kernel[_grid(rows)](
        kernel_rows(rows),
        aligned(divisor),
        maximum,
        keys,
        aligned_draws(draws),
        best,
        candidate,
        drawn,
        mass,
        SPAN=SPAN,
        B=BLOCK,
        num_warps=NUM_WARPS,
    )
    winner = best.argmax(dim=1, keepdim=True)
    return FilteredDraw(
        best=best.gather(1, winner)[:, 0],
        candidate=candidate.gather(1, winner)[:, 0],
        drawn=drawn.gather(1, winner)[:, 0],
        mass=mass.sum(dim=1),
    )


def _grid(rows: RowLogits) -> tuple[int, int]:
    num_rows, num_ids = rows.projected.shape
    return num_rows, triton.cdiv(num_ids, SPAN)
