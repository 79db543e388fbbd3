"""From hidden rows to what a denoising step needs of them, a tile of the vocabulary at a time.

Logits exist for one tile only: it is projected, its statistics are taken, the probability-weighted
embedding grows by the tile's embedding rows, and the next tile is projected over it. Each
tensor-parallel rank does that with its own ids, and the ranks combine seven numbers a row and the
embedding. Rows whose settings need a second look at their logits (top-k, top-p, min-p,
log-probabilities) are projected again, a canvas at a time: see
:mod:`vllm_diffusion.sampling.sampling_functions`.
"""

from collections.abc import Iterable

import torch
import vllm.envs as envs
from torch import Tensor

from attention_kernels.vocab_statistics import (
    LogitAdjustments,
    RowDraws,
    RowLogits,
    RunningStatistics,
    add_product,
    update_statistics,
)
from vllm_diffusion.decoding.rule import PositionStatistics
from vllm_diffusion.sampling.choices import NamedLogits, RunningChoices
from vllm_diffusion.sampling.output_head import OutputHead

# Ids of a tile, on a CPU and on a GPU. Measured as a graph on an H100, at a hidden size of 2816 in
# bf16, of tiles of 4096, 8192, 16384 and 32768 ids (docs/develop/gpu-figures.md): one canvas of 256
# rows takes 2.38, 2.09, 1.94 and 1.79 ms, 8 take 13.3, 11.7, 11.2 and 11.4, and 32 take 47.3, 46.4,
# 44.9 and 44.7. What one tile's logits hold grows with it: at the last, half a byte for each logit
# of the pass.
TILE, TILE_ON_GPU = 4096, 32768


def sample_rows(
    head: OutputHead,
    rows: Tensor,
    draws: RowDraws,
    adjustments: LogitAdjustments | None,
    num_likeliest: int,
    tile_size: int | None = None,
    named_tokens: tuple[int, ...] = (),
    allowed_ids: Iterable[int] | None = None,
) -> PositionStatistics:
    """Project rows to the vocabulary and take from it what the step needs.

    Args:
        head: This rank's ids.
        rows: [num_rows, hidden_size].
        draws: Their temperatures and noise keys.
        adjustments: Adjustments of their logits; ``None`` if there are none.
        num_likeliest: Likeliest tokens that the decoding rule looks at, of every row.
        tile_size: Ids of a tile, a multiple of 4; ``None`` for what suits the device.
        named_tokens: Tokens whose probabilities the decoding rule needs, of every row.
        allowed_ids: The only ids that ``adjustments`` leave some row; ``None`` for all. A tile
            without one of them adds nothing to any sum, so that none is projected and no bit
            changes.

    Returns:
        Statistics of the rows; ``margin`` is of rows that are looked at again.
    """
    num_rows, device = len(rows), rows.device
    if tile_size is None:
        # Whatever the rows: where tiles are cut changes the last bit of a sum.
        tile_size = TILE_ON_GPU if rows.is_cuda else TILE
    running = RunningStatistics.empty(num_rows, device)
    choices = RunningChoices(num_rows, num_likeliest, device) if num_likeliest > 0 else None
    named = NamedLogits(num_rows, named_tokens, device) if named_tokens else None
    embedding, soft_embeds = head.embedding, None
    if embedding is not None:
        soft_embeds = torch.zeros(num_rows, embedding.shape[1], device=device)

    for tile in head.tiles(tile_size, allowed_ids):
        logits = head.project(rows, tile)
        weights = None
        if embedding is not None:
            weights = torch.empty(logits.shape, dtype=embedding.dtype, device=device)
        of_tile = RowLogits(logits, head.first_id + tile.start, head.softcap, adjustments)
        update_statistics(
            running,
            of_tile,
            draws,
            weights=weights,
            product=soft_embeds,
        )
        if choices is not None:
            choices.update(of_tile, draws.temperature)
        if named is not None:
            named.update(of_tile, draws.temperature)
        if soft_embeds is None or weights is None or embedding is None:
            continue
        if not embedding.is_cuda or envs.VLLM_BATCH_INVARIANT:
            # As the platform multiplies, or where rows must not depend on their number.
            soft_embeds.add_(head.matmul(weights, embedding[tile].T))
        else:
            add_product(soft_embeds, weights, embedding[tile])

    running, soft_embeds = _combine_ranks(head, running, soft_embeds)
    return PositionStatistics(
        argmax=running.argmax,
        candidate=running.candidate,
        entropy=running.entropy(),
        drawn_confidence=running.drawn_confidence(),
        confidence=running.confidence(),
        choices=None if choices is None else choices.of_all_ranks(head),
        named=None if named is None else named.probabilities(head, running),
        soft_embeds=soft_embeds,
    )


def _combine_ranks(
    head: OutputHead, own: RunningStatistics, soft_embeds: Tensor | None
) -> tuple[RunningStatistics, Tensor | None]:
    """Statistics and soft embeddings of all ranks' ids, from unnormalised ones of this rank's."""
    running = own
    if head.num_shards > 1:
        running = RunningStatistics.merge(head.gather(own.packed()))
    if soft_embeds is not None:
        # Nothing where none of the rank's ids is possible.
        share = (own.maximum - running.maximum).exp() / running.total
        share = torch.where(own.total > 0, share, 0.0)
        soft_embeds = head.sum(soft_embeds * share[:, None])
    return running, soft_embeds
