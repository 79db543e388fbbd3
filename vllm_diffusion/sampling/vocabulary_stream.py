"""From hidden rows to what a denoising step needs of them, a tile of the vocabulary at a time.

Logits exist for one tile only: it is projected, its statistics are taken, the probability-weighted
embedding grows by the tile's embedding rows, and the next tile is projected over it. Each
tensor-parallel rank does that with its own ids, and the ranks combine seven numbers a row and the
embedding. Rows whose settings need a second look at their logits (top-k, top-p, min-p,
log-probabilities) are kept, as they were projected, as many at a time as the memory bound leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from attention_kernels.vocab_statistics import (
    CHUNK,
    LogitAdjustments,
    RowDraws,
    RowLogits,
    RunningStatistics,
    add_product,
    draw,
    drawn_share,
    largest_logit,
    least_weight,
    update_statistics,
)
from vllm_diffusion.sampling.kept_rows import (
    CandidateFilters,
    KeptRows,
    ReportedRows,
    RowSettings,
    RunningChoices,
    thresholds,
)
from vllm_diffusion.sampling.logprobs import IMPOSSIBLE, row_logprobs
from vllm_diffusion.sampling.output_head import OutputHead

# Ids of a tile, on a CPU and on a GPU. Measured as a graph on an H100, at a hidden size of 2816 in bf16, of
# tiles of 4096, 8192, 16384 and 32768 ids (docs/develop/gpu-figures.md): one canvas of 256 rows takes 2.38,
# 2.09, 1.94 and 1.79 ms, 8 take 13.3, 11.7, 11.2 and 11.4, and 32 take 47.3, 46.4, 44.9 and 44.7. What one tile's
# logits hold grows with it: at the last, half a byte for each logit of the pass.
TILE, TILE_ON_GPU = 4096, 32768
# Kept logits hold at most this many bytes for each logit of the pass, and rows go through the
# vocabulary in groups where that is less than all of those that are kept. One canvas of 256 in bf16
# is below the second bound: cutting it would read the head's weights again for each group.
KEPT_BYTES_PER_LOGIT = 0.5
MIN_KEPT_BYTES = 128 * 2**20
# And this part of that is in float32 at the same time, also where a model projects in it.
FLOAT32_SHARE = 1 / 4


@dataclass(frozen=True)
class RowResults:
    """Results of the canvas rows of a pass.

    Attributes:
        argmax: [num_rows], int64, the likeliest token.
        candidate: [num_rows], int64, the drawn token.
        entropy: [num_rows], float32, nats, of the distribution at the schedule's temperature.
        confidence: [num_rows], float32, probability of ``argmax`` in that distribution.
        drawn_confidence: [num_rows], float32, probability of ``candidate`` in that distribution; in
            a row with a filter, of what it keeps, at the temperature that the row draws at.
        soft_embeds: [num_rows, hidden_size], float32: token embeddings weighted by their
            probability; ``None`` for a model without self-conditioning.
        logprobs: Log-probabilities that the batch wants; ``None`` if it wants none.
        choices: [num_rows, num_likeliest], int64, the likeliest tokens, the likeliest first; ``None`` if
            the rule looks at none.
    """

    argmax: Tensor
    candidate: Tensor
    entropy: Tensor
    confidence: Tensor
    drawn_confidence: Tensor
    soft_embeds: Tensor | None
    logprobs: LogprobsTensors | None
    choices: Tensor | None = None


def sample_rows(
    head: OutputHead,
    rows: Tensor,
    requests: RowSettings,
    vocab_size: int,
    tile_size: int | None = None,
) -> RowResults:
    """Project rows to the vocabulary and take from it what the step needs.

    Args:
        head: This rank's ids.
        rows: [num_rows, hidden_size].
        requests: Their settings.
        vocab_size: Number of ids, of all ranks.
        tile_size: Ids of a tile, a multiple of 4; ``None`` for what suits the device.
    """
    num_rows = rows.shape[0]
    # Every rank cuts in the same places.
    allowed = _kept_bytes(head, num_rows)
    float32_rows = rows_in_float32(head, num_rows)
    at_once = _whole_number(allowed / (head.dtype.itemsize * head.shard_size))
    if head.dtype == torch.float32:
        at_once = float32_rows
    cuts = [0, *requests.kept()[at_once::at_once].tolist(), num_rows]
    if tile_size is None:
        # Whatever the rows: where tiles are cut changes the last bit of a sum.
        tile_size = TILE_ON_GPU if rows.is_cuda else TILE
    parts = []
    for chunk in (slice(a, b) for a, b in pairwise(cuts)):
        group = _RowGroup(head, rows[chunk], requests.within(chunk))
        parts.append(group.sample(vocab_size, tile_size, float32_rows))
    return parts[0] if len(parts) == 1 else _joined(parts, requests.reported)


def _kept_bytes(head: OutputHead, num_rows: int) -> float:
    return max(KEPT_BYTES_PER_LOGIT * num_rows * head.shard_size, MIN_KEPT_BYTES)


def rows_in_float32(head: OutputHead, num_rows: int) -> int:
    """Kept rows of a pass of ``num_rows`` that may be in float32 at the same time."""
    return _whole_number(FLOAT32_SHARE * _kept_bytes(head, num_rows) / (4 * head.shard_size))


def _whole_number(rows: float) -> int:
    """At least one; of many a multiple of 16, so that what is cut starts where kernels like it."""
    return int(rows) // 16 * 16 or max(1, int(rows))


class _RowGroup:
    """Rows that go through the vocabulary together."""

    def __init__(self, head: OutputHead, rows: Tensor, requests: RowSettings) -> None:
        self.head = head
        self.rows = rows
        self.draws = requests.draws
        self.adjustments = requests.adjustments
        self.choices: RunningChoices | None = None
        if requests.num_likeliest > 0:
            self.choices = RunningChoices(len(rows), requests.num_likeliest, rows.device)
        self.kept: KeptRows | None = None
        if requests.filtered is not None or requests.reported is not None:
            self.kept = KeptRows(requests.filtered, requests.reported, rows.device)

    def sample(self, vocab_size: int, tile_size: int, float32_rows: int) -> RowResults:
        head, kept = self.head, self.kept
        projected = None
        if kept is not None:
            projected = torch.empty(
                len(kept.rows), len(head.weight), dtype=head.dtype, device=self.rows.device
            )
        running, soft_embeds = self._stream(vocab_size, tile_size, projected)
        running, soft_embeds = self._combine_ranks(running, soft_embeds)
        candidate, drawn_confidence = running.candidate, running.drawn_confidence()
        logprobs = None
        if kept is not None and projected is not None:
            if kept.filters is not None:
                some = kept.rows[kept.filtered]
                drawn = draw_filtered(
                    head,
                    projected[kept.filtered],
                    self.draws.rows(some),
                    None if self.adjustments is None else self.adjustments.rows(some),
                    kept.filters,
                    vocab_size,
                )
                candidate = candidate.index_copy(0, some, drawn[0])
                drawn_confidence = drawn_confidence.index_copy(0, some, drawn[1])
            if kept.request is not None:
                some, request = kept.rows[kept.reported], kept.request[0]
                selected = (candidate if request.of_drawn else running.argmax)[some]
                logprobs = self._logprobs(selected, projected, kept, float32_rows)
        return RowResults(
            running.argmax,
            candidate,
            running.entropy(),
            running.confidence(),
            drawn_confidence,
            soft_embeds,
            logprobs,
            None if self.choices is None else self.choices.of_all_ranks(head),
        )

    def _stream(
        self, vocab_size: int, tile_size: int, projected: Tensor | None
    ) -> tuple[RunningStatistics, Tensor | None]:
        """Statistics and unnormalised soft embeddings of this rank's ids.

        Args:
            vocab_size: Number of ids, of all ranks.
            tile_size: Ids of a tile.
            projected: [num_kept, num_ids], filled with the logits of rows that are kept.
        """
        head = self.head
        num_rows, device = self.rows.shape[0], self.rows.device
        running = RunningStatistics.empty(num_rows, device)
        embedding, soft_embeds = head.embedding, None
        if embedding is not None:
            soft_embeds = torch.zeros(num_rows, embedding.shape[1], device=device)
        least = None
        if embedding is not None and head.kernels.skip_unlikely:
            least = least_weight(embedding.dtype, vocab_size)

        for tile in head.tiles(tile_size):
            logits = head.project(self.rows, tile)
            if projected is not None and self.kept is not None:
                projected[:, tile] = logits[self.kept.rows]
            weights, occupied = None, None
            if embedding is not None:
                weights = torch.empty(logits.shape, dtype=embedding.dtype, device=device)
            if least is not None:
                chunks = -(-logits.shape[1] // CHUNK)
                occupied = torch.empty(num_rows, chunks, dtype=torch.uint8, device=device)
            of_tile = RowLogits(logits, head.first_id + tile.start, head.softcap, self.adjustments)
            update_statistics(
                running,
                of_tile,
                self.draws,
                weights=weights,
                occupied=occupied,
                least=least or 0.0,
                product=soft_embeds,
                impl=head.kernels.statistics,
            )
            if self.choices is not None:
                self.choices.update(of_tile, self.draws.temperature, head.kernels.kept_rows)
            if soft_embeds is None or weights is None or embedding is None:
                continue
            if occupied is None and (not embedding.is_cuda or envs.VLLM_BATCH_INVARIANT):
                # As the platform multiplies, or where rows must not depend on their number.
                soft_embeds.add_(head.matmul(weights, embedding[tile].T))
            else:
                impl = head.kernels.statistics
                add_product(soft_embeds, weights, embedding[tile], occupied, impl=impl)

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

    def _logprobs(
        self, selected: Tensor, projected: Tensor, kept: KeptRows, float32_rows: int
    ) -> LogprobsTensors:
        """Log-probabilities of all rows; a row whose request wants none reports nothing.

        Args:
            selected: [num_reported], int64, the own token of each row that is reported.
            projected: [num_kept, num_ids], logits of the rows that are kept.
            kept: Which they are.
            float32_rows: Rows that are in float32 at the same time.
        """
        assert kept.request is not None
        head, some = self.head, kept.rows[kept.reported]
        request, adjustments, temperature = kept.request
        computed = row_logprobs(
            RowLogits(projected[kept.reported], head.first_id, head.softcap, adjustments),
            temperature,
            selected,
            request,
            head,
            float32_rows,
        )
        nothing = no_logprobs(len(self.rows), request.num_columns, some.device)
        return LogprobsTensors(
            nothing.logprob_token_ids.index_copy_(0, some, computed.logprob_token_ids),
            nothing.logprobs.index_copy_(0, some, computed.logprobs),
            nothing.selected_token_ranks.index_copy_(0, some, computed.selected_token_ranks),
        )


def draw_filtered(
    head: OutputHead,
    projected: Tensor,
    draws: RowDraws,
    adjustments: LogitAdjustments | None,
    filters: CandidateFilters,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """New draws for rows with a filter; an entry for each in every argument.

    Args:
        head: This rank's ids.
        projected: [n, num_ids], logits of the rows.
        draws: Temperatures and keys.
        adjustments: Adjustments of the logits; ``None`` if there are none.
        filters: What is kept of each row.
        vocab_size: Number of ids, of all ranks.

    Returns:
        [n] int64, their candidates, and [n] float32, the probabilities of these within what is kept,
        at the temperature of the draw; the schedule's where a request is greedy.
    """
    impl = head.kernels.kept_rows
    logits = RowLogits(projected, head.first_id, head.softcap, adjustments)
    divisor = draws.temperature * draws.rate
    # Of the very numbers that thresholds are compared with: another kernel's differ in a bit.
    maximum = head.gather(largest_logit(logits, divisor, impl=impl)).amax(dim=0)
    keys = thresholds(logits, divisor, maximum, filters, vocab_size, head)
    own = draw(logits, divisor, maximum, keys, draws, impl=impl)
    # As with the running statistics, a float32 holds any id.
    packed = torch.stack([own.best, own.candidate.float(), own.drawn, own.mass], dim=-1)
    best, candidate, drawn, mass = head.gather(packed).unbind(-1)
    winner = best.argmax(dim=0, keepdim=True)
    share = drawn_share(drawn.gather(0, winner)[0], maximum, mass.sum(dim=0))
    return candidate.gather(0, winner)[0].long(), share


def no_logprobs(num_rows: int, num_columns: int, device: torch.device) -> LogprobsTensors:
    """Allocate log-probabilities of rows, of which nothing is reported yet."""
    return LogprobsTensors(
        torch.zeros(num_rows, num_columns, dtype=torch.int64, device=device),
        torch.full((num_rows, num_columns), IMPOSSIBLE, device=device),
        torch.zeros(num_rows, dtype=torch.int64, device=device),
    )


def _joined(parts: list[RowResults], reported: ReportedRows | None) -> RowResults:
    soft = [part.soft_embeds for part in parts if part.soft_embeds is not None]
    choices = [part.choices for part in parts if part.choices is not None]
    logprobs = None
    if reported is not None:
        columns, device = reported.request.num_columns, parts[0].argmax.device
        nothing = [no_logprobs(len(part.argmax), columns, device) for part in parts]
        logprobs = _joined_logprobs([part.logprobs for part in parts], nothing)
    return RowResults(
        argmax=torch.cat([part.argmax for part in parts]),
        candidate=torch.cat([part.candidate for part in parts]),
        entropy=torch.cat([part.entropy for part in parts]),
        confidence=torch.cat([part.confidence for part in parts]),
        drawn_confidence=torch.cat([part.drawn_confidence for part in parts]),
        soft_embeds=torch.cat(soft) if soft else None,
        logprobs=logprobs,
        choices=torch.cat(choices) if choices else None,
    )


def _joined_logprobs(
    parts: list[LogprobsTensors | None], nothing: list[LogprobsTensors]
) -> LogprobsTensors:
    """Log-probabilities of groups of rows, one behind the other."""
    each = [empty if part is None else part for part, empty in zip(parts, nothing, strict=True)]
    return LogprobsTensors(
        torch.cat([part.logprob_token_ids for part in each]),
        torch.cat([part.logprobs for part in each]),
        torch.cat([part.selected_token_ranks for part in each]),
    )
