"""Candidates of rows with filters.

Top-k, top-p and min-p keep the tokens whose logit is at least a threshold of the row. The threshold
is searched for, without ever sorting a row: a sweep counts what lies above each of some pivots, and
the next one divides the piece that holds it. Counts and masses are integers, so no number of ranks
changes it. On a CPU, where a sweep is dear, the likeliest tokens of each row are looked at first,
and only rows whose threshold is below them are searched.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.vocab_statistics import (
    LEAST_KEY,
    MASS_SCALE,
    RowDraws,
    RowLogits,
    draw,
    drawn_share,
    largest_key,
    largest_logit,
    largest_logits,
    ordered_keys,
    scaled_logits,
    weigh,
)
from vllm_diffusion.sampling.output_head import OutputHead

# Likeliest ids of a row among which its threshold is looked for before the row is searched, on a
# CPU.
NUM_LIKELIEST = 64


class CandidateFilters(NamedTuple):
    """Restrictions of the candidate's distribution; ``None`` where no row has one.

    Attributes:
        top_k: [num_rows], integer; the vocabulary size is off.
        top_p: [num_rows], float32; 1 is off.
        min_p: [num_rows], float32; 0 is off.
    """

    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None


def thresholds(
    rows: RowLogits,
    divisor: Tensor,
    maximum: Tensor,
    filters: CandidateFilters,
    vocab_size: int,
    head: OutputHead,
) -> Tensor:
    """The least logit that each row keeps, as an ordered key.

    In vLLM's order and with its definitions: min-p, then top-k of what it leaves, then top-p of
    what that leaves. Ties with the last token kept are kept.

    Args:
        rows: This rank's ids.
        divisor: [num_rows], float32: of the candidate's distribution.
        maximum: [num_rows], float32, the largest logit of each row, of all ranks, over ``divisor``.
        filters: One entry per row.
        vocab_size: Number of ids, of all ranks.
        head: Sums over the ranks.

    Returns:
        [num_rows], int64.
    """

    def weighed(
        by_mass: bool, some: slice | Tensor = slice(None)
    ) -> Callable[[Tensor, Tensor], Tensor]:
        own, over, most = rows.rows(some), divisor[some], maximum[some]
        return lambda pivots, bounds: head.sum(
            weigh(own, over, most, pivots, bounds, by_mass=by_mass)
        )

    likeliest = None if rows.projected.is_cuda else _likeliest(rows, divisor, maximum, head)

    def largest(by_mass: bool, wanted: Tensor, active: Tensor) -> Tensor:
        if likeliest is None:
            return largest_key(weighed(by_mass), wanted, maximum, active)
        found, is_settled = likeliest.largest_key(by_mass, wanted)
        found = torch.where(active, found, LEAST_KEY)
        some = (active & ~is_settled).nonzero()[:, 0]
        if len(some) > 0:
            searched = weighed(by_mass, some), wanted[some], maximum[some], active[some]
            found[some] = largest_key(*searched)
        return found

    keys = torch.full(maximum.shape, LEAST_KEY, dtype=torch.int64, device=maximum.device)
    if filters.min_p is not None:
        # At least this fraction of the likeliest token's probability.
        keys = ordered_keys(maximum + filters.min_p.log())
    if filters.top_k is not None:
        wanted = filters.top_k.long().clamp(1, vocab_size)
        active = filters.top_k < vocab_size
        keys = torch.maximum(keys, largest(False, wanted, active))
    if filters.top_p is not None:
        # The smallest set of likeliest tokens whose probability reaches p of what is left.
        active = filters.top_p < 1.0
        everything = torch.stack([keys, ordered_keys(maximum) + 2], dim=1)
        kept = weighed(True)(keys[:, None], everything)[:, 0]
        wanted = (kept.double() * filters.top_p.double()).ceil().long().clamp(min=1)
        nucleus = largest(True, torch.minimum(wanted, kept), active)
        keys = torch.maximum(keys, nucleus)
    return keys


class _Likeliest(NamedTuple):
    """Likeliest ids of each row, of all ranks, among which most thresholds lie.

    Attributes:
        keys: [num_rows, n], int64, descending.
        masses: [num_rows, n], int64: the weights of ``weigh`` by mass.
    """

    keys: Tensor
    masses: Tensor

    def largest_key(self, by_mass: bool, wanted: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the search would, and in which rows that is known; both [num_rows]."""
        weights = self.masses if by_mass else torch.ones_like(self.masses)
        is_enough = weights.cumsum(dim=1) >= wanted[:, None]
        first = is_enough.int().argmax(dim=1, keepdim=True)
        return self.keys.gather(1, first)[:, 0], is_enough[:, -1]


def _likeliest(rows: RowLogits, divisor: Tensor, maximum: Tensor, head: OutputHead) -> _Likeliest:
    """Find the likeliest ids of each row, on a CPU; see :func:`thresholds`."""
    own = head.gather(largest_logits(rows, divisor, NUM_LIKELIEST))
    scores = own.transpose(0, 1).flatten(1).topk(NUM_LIKELIEST).values
    shares = torch.where(scores == float("-inf"), 0.0, (scores - maximum[:, None]).exp())
    return _Likeliest(ordered_keys(scores), (shares * MASS_SCALE).long())


class KeptDraw(NamedTuple):
    """What rows with filters draw; n of them.

    Attributes:
        candidate: [n], int64.
        share: [n], float32, its probability within what is kept, at the temperature of the draw;
            the schedule's where a request is greedy.
        entropy: [n], float32, nats, of what is kept; ``None`` unless it is judged.
        margin: [n], float32, the probability of the likeliest token less that of the next one that
            is kept; ``None`` unless it is judged.
    """

    candidate: Tensor
    share: Tensor
    entropy: Tensor | None = None
    margin: Tensor | None = None


def draw_filtered(
    head: OutputHead,
    logits: RowLogits,
    draws: RowDraws,
    filters: CandidateFilters,
    vocab_size: int,
    judges_kept: bool = False,
) -> KeptDraw:
    """Draw again for rows with a filter; an entry for each in every argument.

    Args:
        head: This rank's ids.
        logits: Of n rows, all of these ids.
        draws: Temperatures and keys.
        filters: What is kept of each row.
        vocab_size: Number of ids, of all ranks.
        judges_kept: True to measure what is kept too.
    """
    divisor = draws.temperature * draws.rate
    # From the very numbers that thresholds are compared with: another kernel's differ in a bit.
    maximum = head.gather(largest_logit(logits, divisor)).amax(dim=0)
    keys = thresholds(logits, divisor, maximum, filters, vocab_size, head)
    own = draw(logits, divisor, maximum, keys, draws)
    # As with the running statistics, a float32 holds any id.
    packed = torch.stack([own.best, own.candidate.float(), own.drawn, own.mass], dim=-1)
    best, candidate, drawn, mass = head.gather(packed).unbind(-1)
    winner = best.argmax(dim=0, keepdim=True)
    result = KeptDraw(
        candidate.gather(0, winner)[0].long(),
        drawn_share(drawn.gather(0, winner)[0], maximum, mass.sum(dim=0)),
    )
    if not judges_kept:
        return result

    scores = scaled_logits(logits, divisor)
    kept = ordered_keys(scores) >= keys[:, None]
    scores = torch.where(kept, scores - maximum[:, None], 0.0)
    weights = torch.where(kept, scores.exp(), 0.0)
    # A rank with one id has no second.
    two = torch.nn.functional.pad(weights, (0, 1)).topk(2).values
    sums = torch.stack([weights.sum(dim=-1), (weights * scores).sum(dim=-1)], dim=-1)
    of_ranks = head.gather(torch.cat([sums, two], dim=-1))
    total, weighted_scores = of_ranks[..., :2].sum(dim=0).unbind(-1)
    first, second = of_ranks[..., 2:].transpose(0, 1).flatten(1).topk(2).values.unbind(-1)
    return result._replace(
        entropy=total.log() - weighted_scores / total, margin=(first - second) / total
    )
