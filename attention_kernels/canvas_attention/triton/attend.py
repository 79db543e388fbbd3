"""Kernel of attention over the keys of one split of a sequence.

Legend: M rows of a tile (tokens x heads of a group), N keys of a tile, D head size, V the part of a
head's values that a program sums; a position counts the keys before it.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

import triton
import triton.language as tl

from attention_kernels.canvas_attention.triton.tiles import (
    LOG2_E,
    VARYING,
    find_sequence,
    load_spans,
    partial_at,
    row_bounds,
    split_tiles,
    store_rows,
    tile_reach,
    tile_rows,
)


@triton.jit
def _operand(tile, like, UPCAST: tl.constexpr):
    """A tile in the dtype of ``like``, as an operand of a matrix product.

    Bytes are E4M3 numbers, and become 1/256 of them: shifted into place they are the fp16 number
    with an exponent bias of 15 for 7. Chips before sm_89 know no other way.
    """
    if tile.dtype == tl.uint8:
        bits = tile.to(tl.uint16)
        tile = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    tile = tile.to(like.dtype)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _attend_tile(
    query_MD,
    acc_MV,
    max_M,
    sum_M,
    tile_n,
    key_N,
    visible_MN,
    block_table_ptr,
    key_ptr,
    value_ptr,
    stride_kb,
    stride_ks,
    stride_vb,
    stride_vs,
    first_v,
    qk_scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Fold one key tile into the running softmax; scores are in units of log 2."""
    d = tl.arange(0, BLOCK_D)
    v = first_v + tl.arange(0, BLOCK_V)
    if CACHE_BLOCK % BLOCK_N == 0:
        block = tl.load(block_table_ptr + tile_n * BLOCK_N // CACHE_BLOCK).to(tl.int64)
    else:
        block = tl.load(block_table_ptr + key_N // CACHE_BLOCK).to(tl.int64)
    slot_N = key_N % CACHE_BLOCK
    key_ptrs = key_ptr + (block * stride_kb + slot_N * stride_ks)[None, :] + d[:, None]
    value_ptrs = value_ptr + (block * stride_vb + slot_N * stride_vs)[:, None] + v[None, :]
    if HEAD_DIM == BLOCK_D:
        key_DN = tl.load(key_ptrs)
    else:
        key_DN = tl.load(key_ptrs, mask=(d < HEAD_DIM)[:, None], other=0.0)

    score_MN = tl.dot(
        _operand(query_MD, query_MD, UPCAST),
        _operand(key_DN, query_MD, UPCAST),
        input_precision="ieee",
    )
    score_MN *= qk_scale
    if HAS_SOFTCAP:
        # tanh from exp2; qk_scale left out log2(e) for it. The exponent is never positive.
        ratio = tl.exp2(tl.abs(score_MN) * (-2.0 * LOG2_E / softcap))
        capped = softcap * LOG2_E * (1.0 - ratio) / (1.0 + ratio)
        score_MN = tl.where(score_MN < 0, -capped, capped)
    score_MN = tl.where(visible_MN, score_MN, float("-inf"))

    new_max_M = tl.maximum(max_M, tl.max(score_MN, 1))
    # A row that has seen nothing yet keeps a maximum of -inf, which must not be subtracted.
    base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)
    weight_MN = tl.exp2(score_MN - base_M[:, None])
    decay_M = tl.exp2(max_M - base_M)
    sum_M = sum_M * decay_M + tl.sum(weight_MN, 1)
    acc_MV = acc_MV * decay_M[:, None]

    if HEAD_DIM == BLOCK_D:
        value_NV = tl.load(value_ptrs)
    else:
        value_NV = tl.load(value_ptrs, mask=(v < HEAD_DIM)[None, :], other=0.0)
    acc_MV = tl.dot(
        _operand(weight_MN, query_MD, UPCAST),
        _operand(value_NV, query_MD, UPCAST),
        acc_MV,
        input_precision="ieee",
    )
    return acc_MV, new_max_M, sum_M


@triton.jit
def _store_partial(part_ptr, acc_MV, max_M, sum_M, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """Write what one split of a tile adds up to, for the combine kernel."""
    m = tl.arange(0, BLOCK_M)
    acc_ptr = partial_at(
        part_ptr, tl.program_id(0), tl.program_id(2), tl.num_programs(2), BLOCK_M, BLOCK_V
    )
    tl.store(acc_ptr + BLOCK_M * BLOCK_V + m, max_M)
    tl.store(acc_ptr + BLOCK_M * (BLOCK_V + 1) + m, sum_M)
    tl.store(acc_ptr + m[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :], acc_MV)


@triton.jit(do_not_specialize=["stride_table", *VARYING])
def canvas_attention_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    out_ptr,
    block_table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    causal_rows_ptr,
    spans_ptr,
    key_scale_ptr,
    value_scale_ptr,
    part_ptr,
    visited_ptr,
    num_seqs,
    window_left,
    window_right,
    qk_scale,
    softcap,
    value_factor,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_ot,
    stride_oh,
    stride_table,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CANVAS_ANCHOR: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
):
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

    SUBGROUPS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // (PARTS * SUBGROUPS)
    first_v = tl.program_id(1) % PARTS * BLOCK_V
    m = tl.arange(0, BLOCK_M)
    row_M, head_M, live_M = tile_rows(m, first_row, query_len, GROUP, HEADS, BLOCK_Q, PARTS)
    token_M = query_start + row_M
    last_row = tl.minimum(first_row + BLOCK_Q, query_len) - 1
    span_start_M = row_M
    span_end_M = row_M
    if HAS_SPANS:
        span_start_M, span_end_M = load_spans(spans_ptr, token_M, row_M, live_M, causal, seq_len)
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
    begin = lower // BLOCK_N
    end = tl.maximum(tl.cdiv(upper, BLOCK_N), begin)
    in_one_piece = True
    if SPLIT:
        per_split = split_tiles(end - begin, tl.num_programs(2), BLOCK_N, MIN_SPLIT)
        in_one_piece = end - begin <= per_split
        begin += tl.program_id(2) * per_split
        if (begin >= end) & (tl.program_id(2) > 0):
            return
        end = tl.minimum(begin + per_split, end)

    d = tl.arange(0, BLOCK_D)
    query_MD = tl.load(
        query_ptr + (token_M.to(tl.int64) * stride_qt + head_M * stride_qh)[:, None] + d[None, :],
        mask=live_M[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    )
    if key_scale_ptr is not None:
        qk_scale *= tl.load(key_scale_ptr)
    if value_scale_ptr is not None:
        value_factor *= tl.load(value_scale_ptr)
    block_table_ptr += seq.to(tl.int64) * stride_table
    key_ptr += kv_head.to(tl.int64) * stride_kh
    value_ptr += kv_head.to(tl.int64) * stride_vh
    lower_M, upper_M = row_bounds(
        row_M, query_len, seq_len, causal, window_left, window_right, CANVAS_ANCHOR
    )
    n = tl.arange(0, BLOCK_N)
    acc_MV = tl.zeros([BLOCK_M, BLOCK_V], dtype=tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros([BLOCK_M], dtype=tl.float32)

    for tile_n in range(begin, end):
        key_N = tile_n * BLOCK_N + n
        visible_MN = (key_N[None, :] >= lower_M[:, None]) & (key_N[None, :] < upper_M[:, None])
        if HAS_SPANS:
            visible_MN |= (key_N[None, :] >= span_start_M[:, None]) & (
                key_N[None, :] < span_end_M[:, None]
            )
        acc_MV, max_M, sum_M = _attend_tile(
            query_MD,
            acc_MV,
            max_M,
            sum_M,
            tile_n,
            # Keys out of reach may lie in blocks that were given back, and after the last
            # one is anything: a key in reach is read in their place, with a weight of 0.
            tl.minimum(tl.maximum(key_N, lower), upper - 1),
            visible_MN,
            block_table_ptr,
            key_ptr,
            value_ptr,
            stride_kb,
            stride_ks,
            stride_vb,
            stride_vs,
            first_v,
            qk_scale,
            softcap,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_V,
            CACHE_BLOCK,
            BLOCK_N,
            HAS_SOFTCAP,
            UPCAST,
        )
    if COUNT:
        tl.atomic_add(visited_ptr + seq, end - begin, mask=first_v == 0)

    # Always 0, which the compiler cannot know: what the rows need for the store is computed anew
    # and does not take registers through the loops.
    zero = tl.load(query_start_ptr + seq, volatile=True) - query_start
    m = zero + tl.arange(0, BLOCK_M)
    # Nested, so that the inner branch is not even compiled without splits.
    if SPLIT:  # noqa: SIM102
        if not in_one_piece:
            _store_partial(part_ptr, acc_MV, max_M, sum_M, BLOCK_M, BLOCK_V)
            return
    row_M, head_M, live_M = tile_rows(m, first_row, query_len, GROUP, HEADS, BLOCK_Q, PARTS)
    store_rows(
        out_ptr,
        acc_MV,
        sum_M,
        value_factor,
        query_start + row_M,
        head_M,
        live_M,
        stride_ot,
        stride_oh,
        first_v,
        HEAD_DIM,
        BLOCK_V,
    )
