"""Kernel that folds the partials of a sequence's splits.

Legend: M rows of a tile (tokens x heads of a group), N keys of a tile, D head size, V the part of a
head's values that a program sums; a position counts the keys before it.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

import triton
import triton.language as tl

from attention_kernels.canvas_attention.triton.tiles import (
    VARYING,
    find_sequence,
    load_spans,
    partial_at,
    split_tiles,
    store_rows,
    tile_reach,
    tile_rows,
)


@triton.jit(do_not_specialize=["num_splits", *VARYING])
def combine_kernel(
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    causal_rows_ptr,
    spans_ptr,
    value_scale_ptr,
    part_ptr,
    num_splits,
    num_seqs,
    window_left,
    window_right,
    value_factor,
    stride_ot,
    stride_oh,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CANVAS_ANCHOR: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Fold the partials of ROWS rows of one tile; a tile in one piece is already written."""
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    PARTS: tl.constexpr = BLOCK_D // BLOCK_V
    tile = tl.program_id(0)
    seq = find_sequence(tile, query_start_ptr, num_seqs, BLOCK_Q, WIDTH)
    query_start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_start
    first_row = (tile - (query_start + seq * (BLOCK_Q - 1)) // BLOCK_Q) * BLOCK_Q
    if first_row >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    causal = tl.load(causal_rows_ptr + seq)
    last_row = tl.minimum(first_row + BLOCK_Q, query_len) - 1
    row_M, _, live_M = tile_rows(
        tl.arange(0, BLOCK_M), first_row, query_len, GROUP, HEADS, BLOCK_Q, PARTS
    )
    span_start_M = row_M
    span_end_M = row_M
    if HAS_SPANS:
        span_start_M, span_end_M = load_spans(
            spans_ptr, query_start + row_M, row_M, live_M, causal, seq_len
        )
    lower, upper = tile_reach(
        first_row,
        last_row,
        query_len,
        seq_len,
        causal,
        window_left,
        window_right,
        span_start_M,
        span_end_M,
        CANVAS_ANCHOR,
        HAS_SPANS,
    )
    num_tiles = tl.maximum(tl.cdiv(upper, BLOCK_N) - lower // BLOCK_N, 0)
    per_split = split_tiles(num_tiles, num_splits, BLOCK_N, MIN_SPLIT)
    if num_tiles <= per_split:
        return

    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row_R, head_R, live_R = tile_rows(r, first_row, query_len, GROUP, HEADS, BLOCK_Q, PARTS)
    live_splits = tl.cdiv(num_tiles, per_split)

    v = tl.arange(0, BLOCK_V)
    max_R = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for split in range(live_splits):
        acc_ptr = partial_at(part_ptr, tile, split, num_splits, BLOCK_M, BLOCK_V)
        max_R = tl.maximum(max_R, tl.load(acc_ptr + BLOCK_M * BLOCK_V + r))
    base_R = tl.where(max_R == float("-inf"), 0.0, max_R)
    sum_R = tl.zeros([ROWS], dtype=tl.float32)
    acc_RV = tl.zeros([ROWS, BLOCK_V], dtype=tl.float32)
    for split in range(live_splits):
        acc_ptr = partial_at(part_ptr, tile, split, num_splits, BLOCK_M, BLOCK_V)
        weight_R = tl.exp2(tl.load(acc_ptr + BLOCK_M * BLOCK_V + r) - base_R)
        sum_R += tl.load(acc_ptr + BLOCK_M * (BLOCK_V + 1) + r) * weight_R
        acc_RV += tl.load(acc_ptr + r[:, None] * BLOCK_V + v[None, :]) * weight_R[:, None]
    if value_scale_ptr is not None:
        value_factor *= tl.load(value_scale_ptr)
    store_rows(
        out_ptr,
        acc_RV,
        sum_R,
        value_factor,
        query_start + row_R,
        head_R,
        live_R,
        stride_ot,
        stride_oh,
        tl.program_id(1) % PARTS * BLOCK_V,
        HEAD_DIM,
        BLOCK_V,
    )
