"""Folds what the splits of FlashAttention-4 found, with their log-sum-exps as weights.

A program takes the splits of one row for some heads. FlashAttention-4 writes each split's output
normalised, and where a split saw nothing of a row a log-sum-exp of -inf, next to which its output
may be anything. Splits that a sequence does not use were not written at all.

Legend: R heads of a row, D head size.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.canvas_attention.splits import MIN_SPLIT_KEYS
from attention_kernels.canvas_attention.triton.launch import SEARCH_WIDTH
from attention_kernels.canvas_attention.triton.tiles import LOG2_E, find_sequence

# Heads that one program folds.
HEADS_OF_PROGRAM = 8


# What changes between steps must not compile the kernel anew when it happens to be 1 or a multiple
# of 16.
@triton.jit(do_not_specialize=["num_splits", "num_seqs", "num_tokens"])
def combine_splits_kernel(
    part_ptr,
    lse_ptr,
    out_ptr,
    query_start_ptr,
    seq_lens_ptr,
    num_splits,
    num_seqs,
    num_tokens,
    stride_ot,
    stride_oh,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0)
    if token >= tl.load(query_start_ptr + num_seqs):
        return
    # A tile is a token.
    seq = find_sequence(token, query_start_ptr, num_seqs, 1, WIDTH)
    keys = tl.maximum(tl.load(seq_lens_ptr + seq), 1)
    live_splits = tl.minimum(tl.cdiv(keys, MIN_SPLIT), num_splits)

    head_R = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    live_R = head_R < NUM_HEADS
    d = tl.arange(0, HEAD_DIM)
    lse_R_ptr = lse_ptr + head_R * num_tokens + token
    max_R = tl.full([HEADS], float("-inf"), dtype=tl.float32)
    for split in range(live_splits):
        lse_R = tl.load(lse_R_ptr + split * NUM_HEADS * num_tokens, live_R, float("-inf"))
        max_R = tl.maximum(max_R, lse_R)
    base_R = tl.where(max_R == float("-inf"), 0.0, max_R)
    sum_R = tl.zeros([HEADS], dtype=tl.float32)
    acc_RD = tl.zeros([HEADS, HEAD_DIM], dtype=tl.float32)
    for split in range(live_splits):
        lse_R = tl.load(lse_R_ptr + split * NUM_HEADS * num_tokens, live_R, float("-inf"))
        weight_R = tl.exp2((lse_R - base_R) * LOG2_E)
        sum_R += weight_R
        row_R = (split * num_tokens + token.to(tl.int64)) * NUM_HEADS + head_R
        part_RD = tl.load(
            part_ptr + row_R[:, None] * HEAD_DIM + d[None, :], (weight_R > 0)[:, None], 0.0
        )
        acc_RD += part_RD * weight_R[:, None]
    out_RD = acc_RD / tl.where(sum_R == 0.0, 1.0, sum_R)[:, None]
    ptrs = out_ptr + token.to(tl.int64) * stride_ot + (head_R * stride_oh)[:, None] + d[None, :]
    tl.store(ptrs, out_RD.to(out_ptr.dtype.element_ty), mask=live_R[:, None])


def combine_splits(
    part: Tensor, lse: Tensor, query_start_loc: Tensor, seq_lens: Tensor, out: Tensor
) -> None:
    """Write the attention of all live rows into ``out``; rows after them are left as they are.

    Args:
        part: [num_splits, num_tokens, num_q_heads, head_dim], fp32, contiguous.
        lse: [num_splits, num_q_heads, num_tokens], fp32, contiguous; natural logarithms.
        query_start_loc: [num_seqs + 1], int32.
        seq_lens: [num_seqs], int32: keys of each sequence, which say how many splits it used.
        out: [num_tokens, num_q_heads, head_dim].
    """
    num_splits, num_tokens, num_heads, head_dim = part.shape
    heads = min(HEADS_OF_PROGRAM, triton.next_power_of_2(num_heads))
    combine_splits_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
        part,
        lse,
        out,
        query_start_loc,
        seq_lens,
        num_splits,
        seq_lens.shape[0],
        num_tokens,
        *out.stride()[:2],
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        MIN_SPLIT=MIN_SPLIT_KEYS,
        WIDTH=SEARCH_WIDTH,
        num_warps=4,
    )
