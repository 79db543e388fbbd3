"""Canvas attention over a paged cache, in Triton.

One program takes a tile of query rows of one sequence together with all query heads that share a
key head, so that a key tile is read once for the whole group, and walks over the key tiles that
some of its rows see. Scores never reach memory. Where a sequence has few rows and many keys,
its key range is cut into splits that run as programs of their own; each writes an unnormalised
fp32 partial (accumulator, row maximum, row sum), and a second kernel folds them in order. How a
tile is cut depends on its own sequence only, so the output of a sequence never depends on who
shares its batch; a tile in one piece is written directly, which gives the same bits as a fold of
one partial. The scratch of the partials is bounded: larger batches run in several launches.

Everything that varies from step to step (lengths, causal rows, block table, spans) is read from
the device, and the grid follows from shapes and the bounds the caller gives, so a captured graph
replays with new values.

Legend: M rows of a tile (tokens x heads of a group), N keys of a tile, D head size; a position
counts the keys before it. Windows that are off arrive as NO_WINDOW.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# Added to or taken from a position it leaves every key in reach, and fits int32 with it.
NO_WINDOW = 2**30
# The most fp32 scratch of one launch. A tile of 64 rows with 2 key heads of 512 takes 2 MiB when it
# is cut into 8 splits: 128 such tiles, or 2,048 programs, fill any GPU several times over.
SCRATCH_BYTES = 256 * 2**20
# Sequences with more rows than this fill a GPU without splits.
MAX_SPLIT_ROWS = 512
# Sequence lengths read at once when a program looks for its sequence.
SEARCH_WIDTH = 128
# Rows that one program of the combine kernel folds.
COMBINE_ROWS = 8
LOG2_E = tl.constexpr(1.4426950408889634)
# What the kernel makes of an E4M3 byte is this much smaller.
FP8_FACTOR = 256.0
# Fixed when the kernels below are decorated, so it is read once, here.
INTERPRETED: bool = triton.knobs.runtime.interpret
SUPPORTED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class TritonConfig:
    """How the kernel is cut. The output of a sequence is fixed by this and the sequence."""

    block_m: int  # rows of a query tile, tokens times heads of a group
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    # A range of keys is split when it is longer than this. One sliding window of 1024 and a canvas
    # of 256 are not: there, writing and reading partials would cost more than idle cores.
    min_split_keys: int = 2048
    max_splits: int = 8


# Chosen without a GPU, from what the compiler reports: the largest tiles that neither spill
# registers nor pass the chip's shared memory (tests/kernels/test_ahead_of_time.py). Keyed by chip,
# then by the padded head size; smaller heads take the entry of 64.
_CONFIGS = {
    # 163 KB of shared memory.
    "sm_80": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(128, 64, 8, 2),
        256: TritonConfig(64, 32, 8, 2),
        512: TritonConfig(64, 16, 8, 2, min_split_keys=1024),
    },
    # sm_86, sm_89: 99 KB.
    "small": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(64, 64, 4, 2),
        256: TritonConfig(64, 32, 8, 2),
        512: TritonConfig(64, 16, 8, 2, min_split_keys=1024),
    },
    # 99 KB.
    "sm_120": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(64, 64, 4, 2),
        256: TritonConfig(64, 32, 8, 2),
        512: TritonConfig(32, 32, 8, 2, min_split_keys=1024),
    },
    # 227 KB.
    "sm_90": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(128, 64, 8, 2),
        256: TritonConfig(64, 64, 8, 2),
        512: TritonConfig(64, 16, 8, 2, min_split_keys=1024),
    },
    # 227 KB.
    "sm_100": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(128, 64, 8, 2),
        256: TritonConfig(64, 64, 8, 2),
        512: TritonConfig(64, 32, 8, 2, min_split_keys=1024),
    },
}
# Bytes pass through registers on their way to shared memory, which larger tiles have not got.
_FP8_NARROW_CONFIG = TritonConfig(64, 64, 8, 2)  # heads of up to 128
_FP8_WIDE_CONFIG = TritonConfig(32, 32, 8, 2, min_split_keys=1024)  # heads of more than 256
# fp32 products do not use tensor cores: for comparisons, not for serving.
_FP32_CONFIG = TritonConfig(16, 16, 4, 1)
# Under the interpreter every operation costs the same, so tiles are large.
_INTERPRETER_CONFIG = TritonConfig(64, 64, 4, 1)


def tuned_config(
    head_dim: int,
    query_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    capability: tuple[int, int],
) -> TritonConfig:
    """The configuration for a head size and dtypes on a GPU of this compute capability."""
    if query_dtype == torch.float32:
        return _FP32_CONFIG
    if cache_dtype != query_dtype and not 128 < head_dim <= 256:
        return _FP8_WIDE_CONFIG if head_dim > 256 else _FP8_NARROW_CONFIG
    major, minor = capability
    if major == 9:
        chip = "sm_90"
    elif major in (10, 11):
        chip = "sm_100"
    elif major == 8 and minor in (0, 7):
        chip = "sm_80"
    elif major == 12:
        chip = "sm_120"
    else:
        chip = "small"
    return _CONFIGS[chip][max(64, triton.next_power_of_2(head_dim))]


@triton.jit
def _find_sequence(tile, query_start_ptr, num_seqs, BLOCK_Q: tl.constexpr, WIDTH: tl.constexpr):
    """The sequence that a query tile belongs to.

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
    m, first_row, query_len, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_Q: tl.constexpr
):
    """Row of its sequence, query head, and whether there is such a row, for rows ``m`` of a tile.

    Heads of a group that do not fit one tile take programs of their own.
    """
    SUBGROUPS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    row_M = first_row + m // HEADS
    head_in_group_M = tl.program_id(1) % SUBGROUPS * HEADS + m % HEADS
    live_M = (m < BLOCK_Q * HEADS) & (row_M < query_len) & (head_in_group_M < GROUP)
    return row_M, tl.program_id(1) // SUBGROUPS * GROUP + head_in_group_M, live_M


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
    """The smallest key interval that holds what the rows of a tile see.

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
def _split_tiles(
    num_tiles,
    query_len,
    BLOCK_N: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
):
    """Key tiles of one split, from the sequence and constants alone; splits are about even."""
    num_splits = tl.minimum(tl.cdiv(num_tiles, MIN_SPLIT // BLOCK_N), MAX_SPLITS)
    per_split = tl.cdiv(num_tiles, tl.maximum(num_splits, 1))
    return tl.where(query_len > MAX_ROWS, num_tiles, per_split)


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
    acc_MD,
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
    qk_scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Fold one key tile into the running softmax; scores are in units of log 2."""
    d = tl.arange(0, BLOCK_D)
    if CACHE_BLOCK % BLOCK_N == 0:
        block = tl.load(block_table_ptr + tile_n * BLOCK_N // CACHE_BLOCK).to(tl.int64)
    else:
        block = tl.load(block_table_ptr + key_N // CACHE_BLOCK).to(tl.int64)
    slot_N = key_N % CACHE_BLOCK
    key_ptrs = key_ptr + (block * stride_kb + slot_N * stride_ks)[None, :] + d[:, None]
    value_ptrs = value_ptr + (block * stride_vb + slot_N * stride_vs)[:, None] + d[None, :]
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
    acc_MD = acc_MD * decay_M[:, None]

    if HEAD_DIM == BLOCK_D:
        value_ND = tl.load(value_ptrs)
    else:
        value_ND = tl.load(value_ptrs, mask=(d < HEAD_DIM)[None, :], other=0.0)
    acc_MD = tl.dot(
        _operand(weight_MN, query_MD, UPCAST),
        _operand(value_ND, query_MD, UPCAST),
        acc_MD,
        input_precision="ieee",
    )
    return acc_MD, new_max_M, sum_M


@triton.jit
def _store_rows(
    out_ptr,
    acc_MD,
    sum_M,
    value_factor,
    token_M,
    head_M,
    live_M,
    stride_ot,
    stride_oh,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Normalise and write rows; one that saw nothing has a sum of 0 and becomes 0."""
    d = tl.arange(0, BLOCK_D)
    # One reciprocal a row: dividing the accumulator would need registers it has not left.
    factor_M = value_factor / tl.where(sum_M == 0.0, 1.0, sum_M)
    out_MD = (acc_MD * factor_M[:, None]).to(out_ptr.dtype.element_ty)
    ptrs = out_ptr + (token_M.to(tl.int64) * stride_ot + head_M * stride_oh)[:, None] + d[None, :]
    tl.store(ptrs, out_MD, mask=live_M[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def _store_partial(
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    acc_MD,
    max_M,
    sum_M,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write what one split of a tile adds up to, for the combine kernel."""
    m = tl.arange(0, BLOCK_M)
    part = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    first = (part * tl.num_programs(2) + tl.program_id(2)) * BLOCK_M
    tl.store(part_max_ptr + first + m, max_M)
    tl.store(part_sum_ptr + first + m, sum_M)
    offset_MD = m[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    tl.store(part_acc_ptr + first * BLOCK_D + offset_MD, acc_MD)


# What changes between steps must not compile the kernel anew when it happens to be 1 or a
# multiple of 16.
_VARYING = ["num_seqs", "first_tile", "window_left", "window_right"]


@triton.jit(do_not_specialize=_VARYING)
def _canvas_attention_kernel(
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
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    visited_ptr,
    num_seqs,
    first_tile,
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
    CACHE_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CANVAS_ANCHOR: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    tile = first_tile + tl.program_id(0)
    seq = _find_sequence(tile, query_start_ptr, num_seqs, BLOCK_Q, WIDTH)
    query_start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_start
    first_row = (tile - (query_start + seq * (BLOCK_Q - 1)) // BLOCK_Q) * BLOCK_Q
    if first_row >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    causal = tl.load(causal_rows_ptr + seq)

    SUBGROUPS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // SUBGROUPS
    m = tl.arange(0, BLOCK_M)
    row_M, head_M, live_M = _tile_rows(m, first_row, query_len, GROUP, HEADS, BLOCK_Q)
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
        per_split = _split_tiles(end - begin, query_len, BLOCK_N, MIN_SPLIT, MAX_SPLITS, MAX_ROWS)
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
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    sum_M = tl.zeros([BLOCK_M], dtype=tl.float32)

    for tile_n in range(begin, end):
        key_N = tile_n * BLOCK_N + n
        visible_MN = (key_N[None, :] >= lower_M[:, None]) & (key_N[None, :] < upper_M[:, None])
        if HAS_SPANS:
            visible_MN |= (key_N[None, :] >= span_start_M[:, None]) & (
                key_N[None, :] < span_end_M[:, None]
            )
        acc_MD, max_M, sum_M = _attend_tile(
            query_MD,
            acc_MD,
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
            qk_scale,
            softcap,
            HEAD_DIM,
            BLOCK_D,
            CACHE_BLOCK,
            BLOCK_N,
            HAS_SOFTCAP,
            UPCAST,
        )
    if COUNT:
        tl.atomic_add(visited_ptr + seq, end - begin)

    # Always 0, which the compiler cannot know: what the rows need for the store is computed anew
    # and does not take registers through the loops.
    zero = tl.load(query_start_ptr + seq, volatile=True) - query_start
    m = zero + tl.arange(0, BLOCK_M)
    # Nested, so that the inner branch is not even compiled without splits.
    if SPLIT:  # noqa: SIM102
        if not in_one_piece:
            _store_partial(
                part_acc_ptr, part_max_ptr, part_sum_ptr, acc_MD, max_M, sum_M, BLOCK_M, BLOCK_D
            )
            return
    row_M, head_M, live_M = _tile_rows(m, first_row, query_len, GROUP, HEADS, BLOCK_Q)
    _store_rows(
        out_ptr,
        acc_MD,
        sum_M,
        value_factor,
        query_start + row_M,
        head_M,
        live_M,
        stride_ot,
        stride_oh,
        HEAD_DIM,
        BLOCK_D,
    )


@triton.jit(do_not_specialize=["num_splits", *_VARYING])
def _combine_kernel(
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    causal_rows_ptr,
    spans_ptr,
    value_scale_ptr,
    part_acc_ptr,
    part_max_ptr,
    part_sum_ptr,
    num_splits,
    num_seqs,
    first_tile,
    window_left,
    window_right,
    value_factor,
    stride_ot,
    stride_oh,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CANVAS_ANCHOR: tl.constexpr,
    HAS_SPANS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MAX_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Fold the partials of ROWS rows of one tile; a tile in one piece is already written."""
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    tile = first_tile + tl.program_id(0)
    seq = _find_sequence(tile, query_start_ptr, num_seqs, BLOCK_Q, WIDTH)
    query_start = tl.load(query_start_ptr + seq)
    query_len = tl.load(query_start_ptr + seq + 1) - query_start
    first_row = (tile - (query_start + seq * (BLOCK_Q - 1)) // BLOCK_Q) * BLOCK_Q
    if (first_row >= query_len) | (query_len > MAX_ROWS):
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    causal = tl.load(causal_rows_ptr + seq)
    last_row = tl.minimum(first_row + BLOCK_Q, query_len) - 1
    row_M, _, live_M = _tile_rows(
        tl.arange(0, BLOCK_M), first_row, query_len, GROUP, HEADS, BLOCK_Q
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
    per_split = _split_tiles(num_tiles, query_len, BLOCK_N, MIN_SPLIT, MAX_SPLITS, MAX_ROWS)
    if num_tiles <= per_split:
        return

    r = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row_R, head_R, live_R = _tile_rows(r, first_row, query_len, GROUP, HEADS, BLOCK_Q)
    part = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * num_splits
    live_splits = tl.cdiv(num_tiles, per_split)

    d = tl.arange(0, BLOCK_D)
    max_R = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for split in range(live_splits):
        max_R = tl.maximum(max_R, tl.load(part_max_ptr + (part + split) * BLOCK_M + r))
    base_R = tl.where(max_R == float("-inf"), 0.0, max_R)
    sum_R = tl.zeros([ROWS], dtype=tl.float32)
    acc_RD = tl.zeros([ROWS, BLOCK_D], dtype=tl.float32)
    for split in range(live_splits):
        rows_R = (part + split) * BLOCK_M + r
        weight_R = tl.exp2(tl.load(part_max_ptr + rows_R) - base_R)
        sum_R += tl.load(part_sum_ptr + rows_R) * weight_R
        acc_RD += tl.load(part_acc_ptr + rows_R[:, None] * BLOCK_D + d[None, :]) * weight_R[:, None]
    if value_scale_ptr is not None:
        value_factor *= tl.load(value_scale_ptr)
    _store_rows(
        out_ptr,
        acc_RD,
        sum_R,
        value_factor,
        query_start + row_R,
        head_R,
        live_R,
        stride_ot,
        stride_oh,
        HEAD_DIM,
        BLOCK_D,
    )


def canvas_attention_triton(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal_rows: Tensor,
    *,
    scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    window_anchor: str,
    row_spans: Tensor | None,
    key_scale: float | Tensor | None,
    value_scale: float | Tensor | None,
    out: Tensor,
    max_query_len: int | None,
    max_seq_len: int | None,
) -> None:
    """Write the attention of every live row into ``out``; arguments as in ``api.py``."""
    _check_supported(query)
    # Numbers are folded on the host; only what lies on the device is read there.
    key_factor = 1.0 if key_scale is None or isinstance(key_scale, Tensor) else key_scale
    value_factor = 1.0 if value_scale is None or isinstance(value_scale, Tensor) else value_scale
    run = _canvas_attention_op if torch.compiler.is_compiling() else launch
    run(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        causal_rows,
        out,
        row_spans,
        key_scale if isinstance(key_scale, Tensor) else None,
        value_scale if isinstance(value_scale, Tensor) else None,
        scale * key_factor,
        value_factor,
        softcap,
        window_left,
        window_right,
        window_anchor == "canvas",
        query.shape[0] if max_query_len is None else max_query_len,
        block_table.shape[1] * key_cache.shape[1] if max_seq_len is None else max_seq_len,
    )


def launch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal_rows: Tensor,
    out: Tensor,
    row_spans: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    scale: float,
    value_factor: float,
    softcap: float,
    window_left: int,
    window_right: int,
    canvas_anchor: bool,
    max_query_len: int,
    max_seq_len: int,
    config: TritonConfig | None = None,
    visited: Tensor | None = None,
) -> None:
    """Launch the kernels on checked arguments.

    ``config`` fixes how the work is cut; ``visited`` [num_seqs], int32, counts the key tiles that
    the programs of each sequence computed.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[2]
    num_seqs = seq_lens.shape[0]
    if config is None:
        config = choose_config(query, key_cache.dtype)
    cut = _constants(config, num_heads // num_kv_heads, head_dim, canvas_anchor, row_spans)
    block_q = config.block_m // cut["HEADS"]
    num_tiles = (num_tokens + num_seqs * (block_q - 1)) // block_q
    head_programs = num_kv_heads * -(-cut["GROUP"] // cut["HEADS"])
    num_splits = _num_splits(config, window_left, row_spans, max_query_len, max_seq_len)

    launch_tiles = num_tiles
    part_acc = part_max = part_sum = None
    if num_splits > 1:
        rows_per_tile = head_programs * num_splits * config.block_m
        launch_tiles = min(
            num_tiles, max(1, SCRATCH_BYTES // (rows_per_tile * (cut["BLOCK_D"] + 2) * 4))
        )
        part_acc = _scratch(launch_tiles * rows_per_tile, cut["BLOCK_D"], query.device)
        part_max, part_sum = _scratch(2, launch_tiles * rows_per_tile, query.device).unbind()

    if key_cache.dtype == torch.float8_e4m3fn:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
        scale, value_factor = scale * FP8_FACTOR, value_factor * FP8_FACTOR
    windows = [NO_WINDOW if window < 0 else window for window in (window_left, window_right)]
    for first_tile in range(0, num_tiles, launch_tiles):
        grid = (min(launch_tiles, num_tiles - first_tile), head_programs)
        _canvas_attention_kernel[(*grid, num_splits)](
            query,
            key_cache,
            value_cache,
            out,
            block_table,
            query_start_loc,
            seq_lens,
            causal_rows,
            row_spans,
            key_scale,
            value_scale,
            part_acc,
            part_max,
            part_sum,
            visited,
            num_seqs,
            first_tile,
            *windows,
            scale if softcap > 0 else scale * LOG2_E.value,
            softcap,
            value_factor,
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            *out.stride()[:2],
            block_table.stride(0),
            **cut,
            CACHE_BLOCK=key_cache.shape[1],
            HAS_SOFTCAP=softcap > 0,
            # Triton's interpreter multiplies the bits of bf16 operands as integers.
            UPCAST=INTERPRETED and query.dtype == torch.bfloat16,
            SPLIT=num_splits > 1,
            COUNT=visited is not None,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if num_splits > 1:
            _combine_kernel[(*grid, -(-config.block_m // COMBINE_ROWS))](
                out,
                query_start_loc,
                seq_lens,
                causal_rows,
                row_spans,
                value_scale,
                part_acc,
                part_max,
                part_sum,
                num_splits,
                num_seqs,
                first_tile,
                *windows,
                value_factor,
                *out.stride()[:2],
                **cut,
                ROWS=COMBINE_ROWS,
                num_warps=4,
            )


def _check_supported(query: Tensor) -> None:
    if query.dtype not in SUPPORTED_DTYPES:
        raise ValueError(
            f'query has dtype {query.dtype}; impl="triton" takes '
            f'{", ".join(map(str, SUPPORTED_DTYPES))}. Use impl="reference" for others.'
        )
    if not 16 <= query.shape[2] <= 512:
        raise ValueError(
            f'query has head_dim {query.shape[2]}; impl="triton" takes 16 to 512. Use '
            'impl="reference" for others.'
        )
    if query.device.type != "cuda" and not INTERPRETED:
        raise NotImplementedError(
            f'impl="triton" needs CUDA tensors and got {query.device}; set TRITON_INTERPRET=1 '
            'before Python starts to run it on a CPU, or use impl="reference".'
        )


def _constants(
    config: TritonConfig,
    group: int,
    head_dim: int,
    canvas_anchor: bool,
    row_spans: Tensor | None,
) -> dict[str, int | bool]:
    """The compile-time arguments that both kernels share."""
    return {
        "GROUP": group,
        "HEADS": min(group, config.block_m),
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CANVAS_ANCHOR": canvas_anchor,
        "HAS_SPANS": row_spans is not None,
        "MIN_SPLIT": config.min_split_keys,
        "MAX_SPLITS": config.max_splits,
        "MAX_ROWS": MAX_SPLIT_ROWS,
        "WIDTH": SEARCH_WIDTH,
    }


def _num_splits(
    config: TritonConfig,
    window_left: int,
    row_spans: Tensor | None,
    max_query_len: int,
    max_seq_len: int,
) -> int:
    """Splits that the longest reach within the caller's bounds can need.

    Only how many programs are launched: where a tile is cut is decided on the device, from its
    own sequence.
    """
    reach = max_seq_len
    if window_left >= 0 and row_spans is None:
        reach = min(reach, window_left + max_query_len)
    # One tile more than the reach fills, since it need not start on a border.
    tiles = -(-reach // config.block_n) + 1
    return min(config.max_splits, max(1, -(-tiles // (config.min_split_keys // config.block_n))))


def _scratch(rows: int, columns: int, device: torch.device) -> Tensor:
    """Uninitialised memory for partials; every number read from it was written in the launch."""
    return torch.empty(rows, columns, dtype=torch.float32, device=device)


def choose_config(query: Tensor, cache_dtype: torch.dtype) -> TritonConfig:
    """The tuned configuration for these inputs on their device."""
    if query.device.type != "cuda":
        return _INTERPRETER_CONFIG
    capability = torch.cuda.get_device_capability(query.device)
    return tuned_config(query.shape[2], query.dtype, cache_dtype, capability)


@torch.library.custom_op("attention_kernels::canvas_attention_triton", mutates_args=("out",))
def _canvas_attention_op(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    causal_rows: Tensor,
    out: Tensor,
    row_spans: Tensor | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    scale: float,
    value_factor: float,
    softcap: float,
    window_left: int,
    window_right: int,
    canvas_anchor: bool,
    max_query_len: int,
    max_seq_len: int,
) -> None:
    launch(
        query,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        causal_rows,
        out,
        row_spans,
        key_scale,
        value_scale,
        scale,
        value_factor,
        softcap,
        window_left,
        window_right,
        canvas_anchor,
        max_query_len,
        max_seq_len,
    )


@_canvas_attention_op.register_fake
def _(*args: object, **kwargs: object) -> None:
    """Writes ``out`` and returns nothing."""
