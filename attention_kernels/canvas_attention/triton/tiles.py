"""The attention mask as the tiles of the kernels see it: their rows, keys and places for partials.

Legend: M rows of a tile (tokens x heads of a group), N keys of a tile, D head size, V the part of a
head's values that a program sums; a position counts the keys before it.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# What changes between steps must not compile the kernel anew when it happens to be 1 or a
# multiple of 16.
VARYING = ["num_seqs", "window_left", "window_right"]


@triton.jit
def find_sequence(tile, query_start_ptr, num_seqs, BLOCK_Q: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sequence that a query tile belongs to.

    Sequence i starts at tile (query_start[i] + i * (BLOCK_Q - 1)) // BLOCK_Q, which leaves every
    sequence at least the tiles it needs and can be read off without a running sum.
    """
    num_started = 0
    for first in range(0, num_seqs, WIDTH):
        idx = first + tl.arange(0, WIDTH)
        start = tl.load(query_start_ptr + idx, mask=idx < num_seqs, other=0)
        offset = (start + idx * (BLOCK_Q - 1)) // BLOCK_Q
        num_started += tl.sum(((idx < num_seqs) & (offset <= tile)).to(tl.int32), 0)
    return num_started - 1


@triton.jit
def tile_rows(
    m,
    first_row,
    query_len,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Row of its sequence, query head, and whether there is such a row, for rows ``m`` of a tile.

    Heads of a group that do not fit one tile take programs of their own, and so do the parts of a
    head's values.
    """
    SUBGROUPS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    row_M = first_row + m // HEADS
    heads = tl.program_id(1) // PARTS
    head_in_group_M = heads % SUBGROUPS * HEADS + m % HEADS
    live_M = (m < BLOCK_Q * HEADS) & (row_M < query_len) & (head_in_group_M < GROUP)
    return row_M, heads // SUBGROUPS * GROUP + head_in_group_M, live_M


@triton.jit
def row_bounds(
    row, query_len, seq_len, causal, window_left, window_right, CANVAS_ANCHOR: tl.constexpr
):
    """First key that query rows see and one past their last, without spans; scalar or tensor."""
    context = seq_len - query_len
    position = context + row
    anchor = position
    if CANVAS_ANCHOR:
        # A causal row lies before the canvas, so this leaves its own position as its anchor.
        anchor = tl.minimum(position, context + causal)
    lower = tl.maximum(anchor - window_left, 0)
    canvas_upper = tl.minimum(position + window_right + 1, seq_len)
    upper = tl.where(row < causal, position + 1, canvas_upper)
    return lower, tl.maximum(upper, 0)


@triton.jit
def load_spans(spans_ptr, token, row, live, causal, seq_len):
    """Span of each row in keys of its sequence; (0, 0) on canvas rows and where there is none."""
    has_span = live & (row < causal)
    start = tl.load(spans_ptr + token * 2, mask=has_span, other=0)
    end = tl.load(spans_ptr + token * 2 + 1, mask=has_span, other=0)
    return tl.maximum(start, 0), tl.minimum(end, seq_len)


@triton.jit
def tile_reach(
    first_row,
    last_row,
    query_len,
    seq_len,
    causal,
    window_left,
    window_right,
    span_start,
    span_end,
    CANVAS_ANCHOR: tl.constexpr,
    HAS_SPANS: tl.constexpr,
):
    """Return the smallest key interval that holds what the rows of a tile see.

    Bounds rise with the row, so the first and the last row give it. Window and span of a row both
    hold the row itself, so there is no hole in it.
    """
    lower, _ = row_bounds(
        first_row, query_len, seq_len, causal, window_left, window_right, CANVAS_ANCHOR
    )
    _, upper = row_bounds(
        last_row, query_len, seq_len, causal, window_left, window_right, CANVAS_ANCHOR
    )
    if HAS_SPANS:
        inside = span_start < span_end
        lower = tl.minimum(lower, tl.min(tl.where(inside, span_start, lower), 0))
        upper = tl.maximum(upper, tl.max(tl.where(inside, span_end, 0), 0))
    return lower, upper


@triton.jit
def split_tiles(num_tiles, num_splits, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr):
    """Key tiles of one split, of as many as were launched and none too short; about even."""
    num_splits = tl.minimum(tl.cdiv(num_tiles, MIN_SPLIT // BLOCK_N), num_splits)
    return tl.cdiv(num_tiles, tl.maximum(num_splits, 1))


@triton.jit
def partial_at(part_ptr, tile, split, num_splits, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the pointer to a split's partial: its accumulator, then row maxima and sums."""
    part = (tile * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * num_splits + split
    return part_ptr + part * (BLOCK_M * (BLOCK_V + 2))


@triton.jit
def store_rows(
    out_ptr,
    acc_MV,
    sum_M,
    value_factor,
    token_M,
    head_M,
    live_M,
    stride_ot,
    stride_oh,
    first_v,
    HEAD_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Normalise and write rows; one that saw nothing has a sum of 0 and becomes 0."""
    v = first_v + tl.arange(0, BLOCK_V)
    # One reciprocal a row: dividing the accumulator would need registers it has not left.
    factor_M = value_factor / tl.where(sum_M == 0.0, 1.0, sum_M)
    out_MV = (acc_MV * factor_M[:, None]).to(out_ptr.dtype.element_ty)
    ptrs = out_ptr + (token_M.to(tl.int64) * stride_ot + head_M * stride_oh)[:, None] + v[None, :]
    tl.store(ptrs, out_MV, mask=live_M[:, None] & (v < HEAD_DIM)[None, :])
