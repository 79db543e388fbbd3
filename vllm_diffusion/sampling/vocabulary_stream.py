"""From hidden rows to what a denoising step needs of them, a tile of the vocabulary at a time.

Logits exist for one tile only: it is projected, its statistics are taken, the probability-weighted
embedding grows by the tile's embedding rows, and the next tile is projected over it. Each
tensor-parallel rank does that with its own ids, and the ranks combine six numbers a row and the
embedding. Settings that need a second look at the logits (top-k, top-p, min-p, log-probabilities)
keep the tiles, as they were projected, for as many rows at a time as the memory bound leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from attention_kernels.vocab_statistics import RowDraws, RunningStatistics, update_statistics
from vllm_diffusion.sampling.candidate_filters import (
    CandidateFilters,
    CandidateTile,
    draw_from,
    thresholds,
)
from vllm_diffusion.sampling.logprobs import LogprobsRequest, row_logprobs
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.row_adjustments import BatchAdjustments

# Ids of a tile. On a GPU the embedding rows of one (23 MB at a hidden size of 2816 in bf16) stay in
# the cache between the two products that read them; with many rows the products are bound by
# arithmetic, and wider tiles pass over the accumulated embedding less often. Not measured yet.
TILE, FEW_ROWS, TILE_OF_MANY_ROWS = 4096, 1024, 8192
# Kept tiles hold at most this many bytes for each logit of the pass, and rows are taken in groups
# where that is less than all of them. One canvas of 256 in bf16 is below the second bound, and its
# tiles are kept whole: cutting it would read the head's weights again for each group.
KEPT_BYTES_PER_LOGIT = 0.5
MIN_KEPT_BYTES = 128 * 2**20


@dataclass(frozen=True)
class RowResults:
    """Of the canvas rows of a pass.

    Attributes:
        argmax: [num_rows], int64, the likeliest token.
        candidate: [num_rows], int64, the drawn token.
        entropy: [num_rows], float32, nats, of the distribution at the schedule's temperature.
        confidence: [num_rows], float32, probability of ``argmax`` in that distribution.
        soft_embeds: [num_rows, hidden_size], float32: token embeddings weighted by their
            probability; ``None`` for a model without self-conditioning.
        logprobs: What the batch wants to know; ``None`` if nothing.
    """

    argmax: Tensor
    candidate: Tensor
    entropy: Tensor
    confidence: Tensor
    soft_embeds: Tensor | None
    logprobs: LogprobsTensors | None


@dataclass(frozen=True)
class RowRequests:
    """What is asked of the canvas rows of a pass.

    Attributes:
        draws: Temperatures and noise keys.
        adjustments: Of the logits; ``None`` if nobody asks for any.
        filters: Of the candidate's distribution; ``None`` if nobody asks for any.
        logprobs: What is to be reported; ``None`` if nothing.
        reports_raw: Report the model's distribution and not the adjusted one.
        reported_temperature: [num_rows], float32: what reported logits are divided by.
    """

    draws: RowDraws
    adjustments: BatchAdjustments | None = None
    filters: CandidateFilters | None = None
    logprobs: LogprobsRequest | None = None
    reports_raw: bool = True
    reported_temperature: Tensor | None = None


def sample_rows(
    head: OutputHead,
    rows: Tensor,
    requests: RowRequests,
    vocab_size: int,
    tile_size: int | None = None,
) -> RowResults:
    """Project rows to the vocabulary and take from it what the step needs.

    Args:
        head: This rank's ids.
        rows: [num_rows, hidden_size].
        requests: What is asked of them.
        vocab_size: Number of ids, of all ranks.
        tile_size: Ids of a tile, a multiple of 4; chosen by the number of rows if ``None``.
    """
    num_rows = rows.shape[0]
    keeps_tiles = requests.filters is not None or requests.logprobs is not None
    group = num_rows
    if keeps_tiles:
        # Every rank cuts in the same places.
        row_bytes = head.shard_size * head.dtype.itemsize
        allowed = max(KEPT_BYTES_PER_LOGIT * num_rows * head.shard_size, MIN_KEPT_BYTES)
        group = max(1, int(allowed) // row_bytes)
    if tile_size is None:
        # Where the tiles are cut changes the last bit of a sum.
        may_vary = rows.is_cuda and not envs.VLLM_BATCH_INVARIANT
        tile_size = TILE_OF_MANY_ROWS if may_vary and min(group, num_rows) > FEW_ROWS else TILE
    parts = [
        _RowGroup(head, rows, requests, slice(start, min(start + group, num_rows))).sample(
            vocab_size, tile_size, keeps_tiles
        )
        for start in range(0, num_rows, group)
    ]
    return parts[0] if len(parts) == 1 else _joined(parts)


class _RowGroup:
    """Rows that go through the vocabulary together."""

    def __init__(self, head: OutputHead, rows: Tensor, requests: RowRequests, chunk: slice) -> None:
        self.head = head
        self.rows = rows[chunk]
        self.chunk = chunk
        self.requests = requests
        self.draws = requests.draws.rows(chunk)
        self.kept: list[tuple[int, Tensor]] = []

    def sample(self, vocab_size: int, tile_size: int, keeps_tiles: bool) -> RowResults:
        running, soft_embeds = self._stream(tile_size, keeps_tiles)
        running, soft_embeds = self._combine_ranks(running, soft_embeds)
        candidate = running.candidate
        if self.requests.filters is not None:
            candidate = self._filtered_candidate(candidate, vocab_size)
        logprobs = None
        if self.requests.logprobs is not None:
            logprobs = row_logprobs(
                self._reported_tiles,
                running.argmax,
                self.requests.logprobs.rows(self.chunk),
                self.head,
            )
        return RowResults(
            running.argmax,
            candidate,
            running.entropy(),
            running.confidence(),
            soft_embeds,
            logprobs,
        )

    def _stream(self, tile_size: int, keeps_tiles: bool) -> tuple[RunningStatistics, Tensor | None]:
        head = self.head
        num_rows, device = self.rows.shape[0], self.rows.device
        running = RunningStatistics.empty(num_rows, device)
        embedding, soft_embeds = head.embedding, None
        if embedding is not None:
            soft_embeds = torch.zeros(num_rows, embedding.shape[1], device=device)
        for tile in head.tiles(tile_size):
            first_id = head.first_id + tile.start
            logits = head.project(self.rows, tile)
            if keeps_tiles:
                self.kept.append((first_id, logits))
            softcap = head.softcap
            if self.requests.adjustments is not None:
                logits, softcap = self._adjusted(first_id, logits), None
            weights = None
            if embedding is not None:
                weights = torch.empty(logits.shape, dtype=embedding.dtype, device=device)
            rescale = update_statistics(
                running, logits, first_id, self.draws, softcap=softcap, weights=weights
            )
            if soft_embeds is not None and weights is not None and embedding is not None:
                soft_embeds.mul_(rescale[:, None])
                _add_product(soft_embeds, weights, embedding[tile], head)
        return running, soft_embeds

    def _combine_ranks(
        self, own: RunningStatistics, soft_embeds: Tensor | None
    ) -> tuple[RunningStatistics, Tensor | None]:
        running = own
        if self.head.num_shards > 1:
            running = RunningStatistics.merge(self.head.gather(own.packed()))
        if soft_embeds is not None:
            # Nothing where none of the rank's ids is possible.
            share = (own.maximum - running.maximum).exp() / running.total
            share = torch.where(own.total > 0, share, 0.0)
            soft_embeds = self.head.sum(soft_embeds * share[:, None])
        return running, soft_embeds

    def _adjusted(self, first_id: int, logits: Tensor) -> Tensor:
        """Capped and adjusted logits of a tile, float32."""
        logits = self.head.cap(logits)
        if self.requests.adjustments is not None:
            self.requests.adjustments.restrict(logits, first_id, self.chunk)
            self.requests.adjustments.apply(logits, first_id, self.chunk)
        return logits

    def _filtered_candidate(self, unfiltered: Tensor, vocab_size: int) -> Tensor:
        """Candidates of rows with a filter; the others keep theirs."""
        assert self.requests.filters is not None
        head, filters = self.head, self.requests.filters.rows(self.chunk)
        # Of the very numbers that thresholds are compared with: another kernel's differ in a bit.
        own = torch.full(unfiltered.shape, float("-inf"), device=unfiltered.device)
        for _, logits in self._candidate_tiles():
            own = torch.maximum(own, logits.amax(dim=-1))
        maximum = head.gather(own).amax(dim=0)
        keys = thresholds(self._candidate_tiles, maximum, filters, vocab_size, head.sum)
        best, candidate = draw_from(self._candidate_tiles, keys, self.draws.noise)
        winner = head.gather(best).argmax(dim=0, keepdim=True)
        filtered = head.gather(candidate).gather(0, winner)[0]
        return torch.where(filters.in_use(vocab_size), filtered, unfiltered)

    def _candidate_tiles(self) -> Iterator[CandidateTile]:
        for first_id, logits in self.kept:
            x = self._adjusted(first_id, logits) / self.draws.temperature[:, None]
            yield CandidateTile(first_id, self.draws.candidate_logits(x))

    def _reported_tiles(self) -> Iterator[CandidateTile]:
        assert self.requests.reported_temperature is not None
        temperature = self.requests.reported_temperature[self.chunk, None]
        for first_id, kept in self.kept:
            if self.requests.reports_raw:
                logits = self.head.cap(kept)
                if self.requests.adjustments is not None:
                    self.requests.adjustments.restrict(logits, first_id, self.chunk)
            else:
                logits = self._adjusted(first_id, kept)
            yield CandidateTile(first_id, logits / temperature)


def _add_product(target: Tensor, weights: Tensor, embedding: Tensor, head: OutputHead) -> None:
    """``target += weights @ embedding``, on a GPU with sums in float32 all the way.

    Args:
        target: [num_rows, hidden_size], float32.
        weights: [num_rows, num_ids], in the dtype of ``embedding``.
        embedding: [num_ids, hidden_size].
        head: Multiplies where rows must not depend on their number.
    """
    if not embedding.is_cuda or envs.VLLM_BATCH_INVARIANT:
        target += head.matmul(weights, embedding.T)
    elif embedding.dtype == torch.float32:
        target.addmm_(weights, embedding)
    else:
        target += torch.mm(weights, embedding, out_dtype=torch.float32)


def _joined(parts: list[RowResults]) -> RowResults:
    soft = [part.soft_embeds for part in parts if part.soft_embeds is not None]
    logprobs = [part.logprobs for part in parts if part.logprobs is not None]
    return RowResults(
        argmax=torch.cat([part.argmax for part in parts]),
        candidate=torch.cat([part.candidate for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
        confidence=torch.cat([part.confidence for part in parts]),
        soft_embeds=torch.cat(soft) if soft else None,
        logprobs=(
            LogprobsTensors(
                torch.cat([part.logprob_token_ids for part in logprobs]),
                torch.cat([part.logprobs for part in logprobs]),
                torch.cat([part.selected_token_ranks for part in logprobs]),
            )
            if logprobs
            else None
        ),
    )
