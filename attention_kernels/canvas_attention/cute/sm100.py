"""Canvas attention on Blackwell (SM100): FlashAttention-4's kernel with the canvas mask, head 256.

Stands on the public ``flash-attn-4``: for head size 256 vLLM's copy has another kernel on these
GPUs, which takes its key tiles from one flag for the whole batch. Head size 512 does not fit: two
tiles of scores and an output tile need 768 columns of tensor memory, which has 512.
"""

# Device code is typed by its DSL.
# mypy: allow-incomplete-defs, allow-untyped-defs

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from flash_attn.cute import utils
from flash_attn.cute.block_info import BlockInfo
from flash_attn.cute.flash_fwd_sm100 import FlashAttentionForwardSm100
from flash_attn.cute.mask import (
    AttentionMask,
    mask_r2p_lambda,
    r2p_bitmask_above,
    r2p_bitmask_below,
)
from flash_attn.cute.seqlen_info import SeqlenInfoQK

from attention_kernels.canvas_attention.cute.tiles import (
    Bookkeeping,
    CanvasKernel,
    through_canvas,
    visibility,
)


@dataclass(frozen=True)
class CanvasMask(AttentionMask):
    """Hides the scores that the canvas mask hides."""

    canvas_anchor: bool = True

    def apply_mask_sm100(self, acc_S, *, m_block, n_block, thr_mma, thr_tmem_load, **_):
        """Hide scores of one thread, which holds one row; never called for a tile seen whole."""
        tile = cute.make_identity_tensor((self.tile_m, self.tile_n))
        coords = thr_tmem_load.partition_D(thr_mma.partition_C(tile)[(None, None), 0, 0])
        seen = visibility(self, self.seqlen_info)
        row = (m_block * self.tile_m + coords[0][0]) // self.qhead_per_kvhead_packgqa
        first_key = n_block * self.tile_n
        below = cutlass.max(seen.upper(row) - first_key, 0)
        above = cutlass.max(seen.lower(row) - first_key, 0)

        def bits(chunk):
            return r2p_bitmask_below(below, chunk) & r2p_bitmask_above(above, chunk)

        mask_r2p_lambda(acc_S, bits, rank1=True)


class CanvasAttentionSm100(CanvasKernel, FlashAttentionForwardSm100):
    """The kernel for one head size, group, dtype and choice of windows."""

    bookkeeping = Bookkeeping(BlockInfo, SeqlenInfoQK, AttentionMask, CanvasMask)
    launch_stock = FlashAttentionForwardSm100.__call__
    load = through_canvas(FlashAttentionForwardSm100.load)
    mma = through_canvas(FlashAttentionForwardSm100.mma)
    softmax_loop = through_canvas(FlashAttentionForwardSm100.softmax_loop)
    correction_loop = through_canvas(FlashAttentionForwardSm100.correction_loop)
    epilogue_s2g = through_canvas(FlashAttentionForwardSm100.epilogue_s2g)

    def __init__(self, dtype, head_dim, group, tile, softcap, canvas_anchor, split):
        # The dtype is read off the tensors here.
        super().__init__(
            head_dim,
            head_dim,
            qhead_per_kvhead=group,
            # Has the kernel ask which tiles to mask, on both sides of those that are seen whole.
            is_local=True,
            pack_gqa=group > 1,
            m_block_size=tile[0],
            n_block_size=tile[1],
            # Two query tiles of this head size do not fit tensor memory.
            q_stage=1,
            is_static_persistent=False,
            is_varlen_q=True,
            score_mod=utils.create_softcap_scoremod(softcap) if softcap > 0 else None,
            # Whole cache blocks loaded at once would bring keys beyond the sequence into a tile.
            # Hidden they weigh nothing, but nothing times NaN is NaN; row by row they are zero.
            paged_kv_non_tma=True,
            is_split_kv=split,
        )
        self.canvas_anchor = canvas_anchor
        if split:
            # Stock's shares of the registers leave the softmax warps too few to compile with a
            # window, and have those that write fp32 spill 1,360 bytes; with these it is 8.
            self.num_regs_softmax = 192
            self.num_regs_correction = 128
            self.num_regs_other = 96
