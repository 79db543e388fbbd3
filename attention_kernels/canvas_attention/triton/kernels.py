"""The two kernels, and the attention rule as their tiles see it.

Legend: M rows of a tile (tokens x heads of a group), N keys of a tile, D head size, V the part of a
head's values that a program sums; a position counts the keys before it.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_sequence(tile, query_start_ptr, num_seqs, BLOCK_Q: tl.constexpr, WIDTH: tl.constexpr):
    """Return the sequence that a query tile belongs to.

    Sequence i starts at tile (query_start[i] + i * (BLOCK_Q - 1)) // BLOCK_Q, which leaves every
    sequence at least the tiles it needs and can be read off without a running sum.
    """
    found = 0
    for first in range(0, num_seqs, WIDTH):
        idx = first + tl.arange(0, WIDTH)
        start = tl.load(query_start_ptr + idx, mask=idx < num_seqs, other=0)
        offset = (start + idx * (BLOCK_Q - 1)) // BLOCK_Q
        found += tl.sum(((idx < num_seqs) & (offset <= tile)).to(tl.int32), 0)
    return found - 1


@triton.jit
def _tile_rows(
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
def _row_bounds(
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
def _load_spans(spans_ptr, token, row, live, causal, seq_len):
    """Span of each row in keys of its sequence; (0, 0) on canvas rows and where there is none."""
    has_span = live & (row < causal)
    start = tl.load(spans_ptr + token * 2, mask=has_span, other=0)
    end = tl.load(spans_ptr + token * 2 + 1, mask=has_span, other=0)
    return tl.maximum(start, 0), tl.minimum(end, seq_len)


@triton.jit
def _tile_reach(
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
    lower, _ = _row_bounds(
        first_row, query_len, seq_len, causal, window_left, window_right, CANVAS_ANCHOR
    )
    _, upper = _row_bounds(
        last_row, query_len, seq_len, causal, window_left, window_right, CANVAS_ANCHOR
    )
    if HAS_SPANS:
        inside = span_start < span_end
        lower = tl.minimum(lower, tl.min(tl.where(inside, span_start, lower), 0))
        upper = tl.maximum(upper, tl.max(tl.where(inside, span_end, 0), 0))
    return lower, upper


@triton.jit
def _split_tiles(num_tiles, num_splits, BLOCK_N: tl.constexpr, MIN_SPLIT: tl.constexpr):
    """Key tiles of one split, of as many as were launched and none too short; about even."""
    num_splits = tl.minimum(tl.cdiv(num_tiles, MIN_SPLIT // BLOCK_N), num_splits)
    return tl.cdiv(num_tiles, tl.maximum(num_splits, 1))


@triton.jit
def _partial(part_ptr, tile, split, num_splits, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return the pointer to a split's partial: its accumulator, then row maxima and sums."""
    part = (tile * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * num_splits + split
    return part_ptr + part * (BLOCK_M * (BLOCK_V + 2))


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
def _store_rows(
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


@triton.jit
def _store_partial(part_ptr, acc_MV, max_M, sum_M, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr):
    """Write what one split of a tile adds up to, for the combine kernel."""
    m = tl.arange(0, BLOCK_M)
    acc_ptr = _partial(
        part_ptr, tl.program_id(0), tl.program_id(2), tl.num_programs(2), BLOCK_M, BLOCK_V
    )
    tl.store(acc_ptr + BLOCK_M * BLOCK_V + m, max_M)
    tl.store(acc_ptr + BLOCK_M * (BLOCK_V + 1) + m, sum_M)
    tl.store(acc_ptr + m[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :], acc_MV)


# What changes between steps must not compile the kernel anew when it happens to be 1 or a
# multiple of 16.
_VARYING = ["num_seqs", "window_left", "window_right"]


@triton.jit(do_not_specialize=["stride_table", *_VARYING])
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
    row_M, head_M, live_M = _tile_rows(m, first_row, query_len, GROUP, HEADS, BLOCK_Q, PARTS)
    token_M = query_start + row_M
    last_row = tl.minimum(first_row + BLOCK_Q, query_len) - 1
    span_start_M = row_M
    span_end_M = row_M
    if HAS_SPANS:
        span_start_M, span_end_M = _load_spans(spans_ptr, token_M, row_M, live_M, causal, seq_len)
    lower, upper = _tile_reach(
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
        per_split = _split_tiles(end - begin, tl.num_programs(2), BLOCK_N, MIN_SPLIT)
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
    lower_M, upper_M = _row_bounds(
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
            # Keys out of reach may lie in blocks that were given back, and behind the last
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
    row_M, head_M, live_M = _tile_rows(m, first_row, query_len, GROUP, HEADS, BLOCK_Q, PARTS)
    _store_rows(
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


@triton.jit(do_not_specialize=["num_splits", *_VARYING])
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
    row_M, _, live_M = _tile_rows(
        tl.arange(0, BLOCK_M), first_row, query_len, GROUP, HEADS, BLOCK_Q, PARTS
    )
    span_start_M = row_M
    span_end_M = row_M
    if HAS_SPANS:
        span_start_M, span_end_M = _load_spans(
            spans_ptr, query_start + row_M, row_M, live_M, causal, seq_len
        )
    lower, upper = _tile_reach(
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
    per_split = _split_tiles(num_tiles, num_splits, BLOCK_N, MIN_SPLIT)
    if num_tiles <= per_split:
        return

    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row_R, head_R, live_R = _tile_rows(r, first_row, query_len, GROUP, HEADS, BLOCK_Q, PARTS)
    live_splits = tl.cdiv(num_tiles, per_split)

    v = tl.arange(0, BLOCK_V)
    max_R = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for split in range(live_splits):
        acc_ptr = _partial(part_ptr, tile, split, num_splits, BLOCK_M, BLOCK_V)
        max_R = tl.maximum(max_R, tl.load(acc_ptr + BLOCK_M * BLOCK_V + r))
    base_R = tl.where(max_R == float("-inf"), 0.0, max_R)
    sum_R = tl.zeros([ROWS], dtype=tl.float32)
    acc_RV = tl.zeros([ROWS, BLOCK_V], dtype=tl.float32)
    for split in range(live_splits):
        acc_ptr = _partial(part_ptr, tile, split, num_splits, BLOCK_M, BLOCK_V)
        weight_R = tl.exp2(tl.load(acc_ptr + BLOCK_M * BLOCK_V + r) - base_R)
        sum_R += tl.load(acc_ptr + BLOCK_M * (BLOCK_V + 1) + r) * weight_R
        acc_RV += tl.load(acc_ptr + r[:, None] * BLOCK_V + v[None, :]) * weight_R[:, None]
    if value_scale_ptr is not None:
        value_factor *= tl.load(value_scale_ptr)
    _store_rows(
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
