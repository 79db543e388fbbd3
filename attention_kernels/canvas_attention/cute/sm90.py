"""Canvas attention on Hopper: FlashAttention-4's SM90 kernel with the canvas mask, head 256 and
512.

Stands on the copy of FlashAttention-4 inside vLLM, since the public ``flash-attn-4`` ends at head
size 256 there. One block of 64 or 128 (row, head of a group) pairs walks the key tiles its rows
see, keys and values arriving by ``cp.async`` from any cache block size.
"""

# Device code is typed by its DSL.
# mypy: allow-incomplete-defs, allow-untyped-defs

from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from quack import layout_utils

# The only FlashAttention-4 with a Hopper kernel for head size 512. Nothing of the engine is used.
from vllm.vllm_flash_attn.cute import utils  # noqa: TID251
from vllm.vllm_flash_attn.cute.block_info import BlockInfo  # noqa: TID251
from vllm.vllm_flash_attn.cute.flash_fwd_sm90 import FlashAttentionForwardSm90  # noqa: TID251
from vllm.vllm_flash_attn.cute.mask import (  # noqa: TID251
    AttentionMask,
    mask_r2p_lambda,
    r2p_bitmask_above,
    r2p_bitmask_below,
    sm90_col_to_r2p_idx,
)
from vllm.vllm_flash_attn.cute.seqlen_info import SeqlenInfoQK  # noqa: TID251
from vllm.vllm_flash_attn.cute.tile_scheduler import (  # noqa: TID251
    SingleTileVarlenScheduler,
    WorkTileInfo,
)

from attention_kernels.canvas_attention.cute.tiles import (
    Bookkeeping,
    CanvasKernel,
    CanvasTileRange,
    through_canvas,
    visibility,
)


@dataclass(frozen=True)
class CanvasMask(AttentionMask):
    """Hides the scores that the canvas mask hides."""

    canvas_anchor: bool = True

    def apply_mask(self, acc_S, *, m_block, n_block, thr_mma, **_):
        """Hide scores of one thread; vLLM's copy asks this of tiles that are seen whole, too."""
        seen = visibility(self, self.seqlen_info)
        cut = self.tile_m, self.tile_n, self.qhead_per_kvhead_packgqa
        is_cut_right = n_block >= seen.first_cut_right(m_block, *cut)
        is_cut_left = n_block < seen.first_whole_left(m_block, *cut)
        run_if(
            is_cut_right | is_cut_left, partial(self._hide, seen, acc_S, m_block, n_block, thr_mma)
        )

    def _hide(self, seen, acc_S, m_block, n_block, thr_mma):
        """Hide what the rows of one thread do not see of a tile."""
        scores = layout_utils.reshape_acc_to_mn(acc_S)
        tile = cute.make_identity_tensor((self.tile_m, self.tile_n))
        coords = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(tile))
        # Counted from the thread's first column, as the registers are.
        first_key = n_block * self.tile_n + coords[0, 0][1]
        for r in range(cute.size(coords.shape[0])):
            row = (m_block * self.tile_m + coords[r, 0][0]) // self.qhead_per_kvhead_packgqa
            below = sm90_col_to_r2p_idx(cutlass.max(seen.upper(row) - first_key, 0))
            above = sm90_col_to_r2p_idx(cutlass.max(seen.lower(row) - first_key, 0))

            def bits(chunk, below=below, above=above):
                return r2p_bitmask_below(below, chunk) & r2p_bitmask_above(above, chunk)

            mask_r2p_lambda(scores[r, None], bits, rank1=True)


@cute.jit
def run_if(condition: cutlass.Boolean, work: cutlass.Constexpr):
    """Trace ``work`` under a condition that is known on the device only."""
    if condition:
        work()


def without_dead_splits(create, sequence_of, block_info):
    """A scheduler that ends a program at once if its sequence does not use the program's split.

    Stock's programs load and multiply a key tile there, and write what is never read. On Blackwell
    they do not.
    """
    scheduler = create()
    first = scheduler.initial_work_tile_info
    num_seqs = create.args[0].decoder.num_batch

    def initial_work_tile_info():
        work = first()
        _, _, batch_idx, split_idx = work.tile_idx
        # A program after the last query tile has no sequence.
        sequence = sequence_of(cutlass.min(batch_idx, num_seqs - 1))
        live = visibility(block_info, sequence).live_splits(block_info.num_splits)
        return WorkTileInfo(work.tile_idx, work.is_valid_tile & (split_idx < live))

    # Read once, before the loop over tiles, which makes new objects of this one.
    scheduler.initial_work_tile_info = initial_work_tile_info
    return scheduler


class CanvasAttentionSm90(CanvasKernel, FlashAttentionForwardSm90):
    """The kernel for one head size, group, dtype and choice of windows."""

    bookkeeping = Bookkeeping(BlockInfo, SeqlenInfoQK, AttentionMask, CanvasMask)
    launch_stock = FlashAttentionForwardSm90.__call__
    load = through_canvas(FlashAttentionForwardSm90.load)
    mma = through_canvas(FlashAttentionForwardSm90.mma)

    def __init__(self, dtype, head_dim, group, tile, softcap, canvas_anchor, split):
        # Tiles, stages and the rest are stock's choice for these head sizes.
        wide = head_dim > 256
        super().__init__(
            dtype,
            head_dim,
            head_dim,
            group,
            # Has the kernel ask which tiles to mask, on both sides of those that are seen whole.
            is_local=True,
            pack_gqa=group > 1,
            tile_m=tile[0],
            tile_n=tile[1],
            num_stages=1 if wide else 2,
            num_threads=384,
            intra_wg_overlap=True,
            mma_pv_is_rs=not wide,
            score_mod=utils.create_softcap_scoremod(softcap) if softcap > 0 else None,
            # Whole cache blocks loaded at once would bring keys beyond the sequence into a tile.
            # Hidden they weigh nothing, but nothing times NaN is NaN; row by row they are zero.
            paged_kv_non_tma=True,
            is_split_kv=split,
        )
        self.canvas_anchor = canvas_anchor

    def exchanged(self, args, kwargs):
        """With splits, the tile scheduler is exchanged as well."""
        args, kwargs = super().exchanged(args, kwargs)
        if self.is_split_kv:
            (block_info,) = [arg for arg in args if isinstance(arg, CanvasTileRange)]
            made = {arg.func: arg for arg in args if isinstance(arg, partial)}
            create = made[SingleTileVarlenScheduler.create]
            sequence_of = made[self.bookkeeping.canvas_sequence_of]
            live = partial(without_dead_splits, create, sequence_of, block_info)
            args = [live if arg is create else arg for arg in args]
        return args, kwargs
