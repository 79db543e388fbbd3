"""Reading of logits and generation of noise, shared by every kernel here.

A logit is capped, adjusted and divided in registers, each time it is read: stored logits stay in
the dtype of the projection. If no row of the batch has adjustments they are not compiled in; if
another row has some, a row without loads four indices per block.

Legend: B ids at a time; x is a logit after all of that.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.noise import Purpose
from attention_kernels.vocab_statistics.logits import LAST_RESORT, LogitAdjustments, RowLogits
from attention_kernels.vocab_statistics.running import RowDraws

_CANDIDATE = tl.constexpr(int(Purpose.CANDIDATE) << 24)
_LAST_RESORT = tl.constexpr(LAST_RESORT)
_LOG_2 = tl.constexpr(math.log(2))
_TWO_OVER_LOG_2 = tl.constexpr(2 / math.log(2))


class _Tables(NamedTuple):
    """:class:`LogitAdjustments` with the distance between two rows of each table."""

    list_idx: Tensor
    listed_ids: Tensor
    listed_offsets: Tensor
    other_offsets: Tensor
    list_length: int
    penalty_idx: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    prompt_mask: Tensor
    prompt_mask_stride: int
    output_counts: Tensor
    output_counts_stride: int
    mask_idx: Tensor
    masks: Tensor
    masks_stride: int
    pin: Tensor


def aligned(values: Tensor) -> Tensor:
    """One value for each row, at an address that Triton compiles for: a slice may start anywhere.

    A kernel would otherwise be compiled anew, in the middle of serving, for each pattern of them.
    """
    return values if values.data_ptr() % 16 == 0 else values.clone()


def aligned_draws(draws: RowDraws) -> RowDraws:
    """Apply :func:`aligned` to each tensor."""
    return RowDraws(*(aligned(values) for values in draws))


class Rows(NamedTuple):
    """:class:`RowLogits` as a kernel reads them; the same argument in every kernel."""

    projected: Tensor
    stride: int
    num_ids: int
    first_id: int
    softcap: float | None
    tables: _Tables | None


def kernel_rows(rows: RowLogits) -> Rows:
    """The argument for some rows.

    Raises:
        ValueError: If the ids of a row are not contiguous.
    """
    projected = rows.projected
    if projected.stride(1) != 1:
        raise ValueError("The last dimension of projected must be contiguous.")
    return Rows(
        projected,
        projected.stride(0),
        projected.shape[1],
        rows.first_id,
        rows.softcap,
        None if rows.adjustments is None else _tables(rows.adjustments),
    )


def _tables(a: LogitAdjustments) -> _Tables:
    return _Tables(
        aligned(a.list_idx),
        a.listed_ids,
        a.listed_offsets,
        a.other_offsets,
        a.listed_ids.shape[1],
        aligned(a.penalty_idx),
        a.repetition,
        a.frequency,
        a.presence,
        a.prompt_mask,
        a.prompt_mask.stride(0),
        a.output_counts,
        a.output_counts.stride(0),
        aligned(a.mask_idx),
        a.masks,
        a.masks.stride(0),
        aligned(a.pin),
    )


@triton.jit
def capped(x, softcap):
    """[B] logits after the cap, if there is one."""
    if softcap is not None:
        # tanh(y) = 1 - 2 / (exp(2y) + 1), which is right at both ends. Written so that it is one
        # multiplication, one exponential, one reciprocal and one fused sum.
        share = 1.0 / (tl.exp2(x * (_TWO_OVER_LOG_2 / softcap)) + 1.0)
        x = tl.fma(-2.0 * softcap, share, softcap)
    return x


@triton.jit
def load_x(rows, row, offset, inverse):
    """[B] x of the ids at ``offset`` of a row; minus infinity outside.

    ``inverse`` is one over the divisor: a division for each id costs a tenth of a pass here, and is
    no closer as the device makes it.
    """
    inside = offset < rows.num_ids
    x = tl.load(rows.projected + row * rows.stride + offset, mask=inside, other=0.0)
    x = capped(x.to(tl.float32), rows.softcap)
    if rows.tables is not None:
        x = _adjusted(x, row, rows.first_id + offset, inside, rows.tables)
    return tl.where(inside, x * inverse, float("-inf"))


@triton.jit
def _adjusted(x, row, ids, inside, tables):
    """Adjust logits as ``LogitAdjustments.apply`` does."""
    list_row = tl.load(tables.list_idx + row).to(tl.int64)
    if list_row >= 0:
        x += _listed_offset(ids, list_row, tables)
    penalty_row = tl.load(tables.penalty_idx + row).to(tl.int64)
    if penalty_row >= 0:
        counts = tl.load(
            tables.output_counts + penalty_row * tables.output_counts_stride + ids,
            mask=inside,
            other=0,
        )
        prompt_mask = tables.prompt_mask + penalty_row * tables.prompt_mask_stride
        in_prompt = _bits(prompt_mask, ids, inside)
        repetition = tl.load(tables.repetition + penalty_row)
        scaled = tl.where(x > 0, x / repetition, x * repetition)
        x = tl.where(in_prompt | (counts > 0), scaled, x)
        x -= tl.load(tables.frequency + penalty_row) * counts.to(tl.float32)
        x -= tl.load(tables.presence + penalty_row) * (counts > 0).to(tl.float32)
    mask_row = tl.load(tables.mask_idx + row).to(tl.int64)
    if mask_row >= 0:
        allowed = _bits(tables.masks + mask_row * tables.masks_stride, ids, inside)
        x = tl.where(allowed, tl.maximum(x, _LAST_RESORT), float("-inf"))
    pin = tl.load(tables.pin + row)
    if pin >= 0:
        x = tl.where(ids == pin, 0.0, float("-inf"))
    return x


@triton.jit
def _listed_offset(ids, row, tables):
    """[B] what a list adds to the logits of ids, which are looked for in it by halves."""
    listed = tables.listed_ids + row * tables.list_length
    place = tl.zeros_like(ids)
    step = tables.list_length // 2
    while step > 0:
        is_below = tl.load(listed + place + step - 1) < ids
        place = tl.where(is_below, place + step, place)
        step = step // 2
    offset = tl.load(tables.listed_offsets + row * tables.list_length + place)
    other = tl.load(tables.other_offsets + row)
    return tl.where(tl.load(listed + place) == ids, offset, other)


@triton.jit
def _bits(mask_ptr, ids, inside):
    return ((tl.load(mask_ptr + (ids >> 5), mask=inside, other=0) >> (ids & 31)) & 1) == 1


@triton.jit
def ordered_key(x):
    """[B] int32 that compare as x does; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def load_uniform(draws, row, first_id, B: tl.constexpr):
    """[B] between 0 and 1, of the ids from ``first_id``, a multiple of 4."""
    w0, w1, w2, w3 = tl.philox(
        tl.load(draws.seed + row),
        (first_id // 4 + tl.arange(0, B // 4)).to(tl.uint32),
        tl.load(draws.position + row).to(tl.uint32),
        (tl.load(draws.step + row) | _CANDIDATE).to(tl.uint32),
        tl.load(draws.canvas_idx + row).to(tl.uint32),
    )
    # Flattened row by row this is w0, w1, w2, w3 of the first group, and so on.
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [B])
    return tl.minimum(
        (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 1.0 - 5.9604644775390625e-8
    )


@triton.jit
def gumbel(v):
    """[B] as ``attention_kernels.noise.gumbel_noise`` of what is uniform."""
    # -log(1 - v): a logarithm near 1 is only good to an absolute error, and small v decide.
    series = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * (0.25 + v * 0.2))))
    exponential = tl.where(v < 0.015625, series, -tl.log(1.0 - v))
    return -tl.log(exponential)


@triton.jit
def gumbel_bound(v):
    """[B] at least :func:`gumbel` of the same, by at most 0.07 where that is large, without a
    logarithm.

    -log(-log(1 - v)) is at most -log(v), and the bits of a float32, as an integer, are 2**23 times
    at most its logarithm to the base 2, plus 127.
    """
    bits = v.to(tl.int32, bitcast=True).to(tl.float32)
    # The thousandth is for what is rounded.
    return bits * (-_LOG_2 / 8388608.0) + (_LOG_2 * 127.0 + 0.001)


@triton.jit
def load_noise(draws, row, first_id, B: tl.constexpr):
    """[B] Gumbel noise of the ids from ``first_id``, a multiple of 4; zero in a greedy row."""
    noise = gumbel(load_uniform(draws, row, first_id, B))
    return tl.where(tl.load(draws.request_temperature + row) == 0.0, 0.0, noise)
