"""Top-k, top-p and min-p of the candidate's distribution, without ever sorting a row.

Each of them keeps the tokens whose logit is at least a threshold of the row. The threshold is found
digit by digit: a histogram of a logit's leading 8 bits says in which of 256 ranges it lies, the
next 8 bits cut that range, and after four sweeps over the tiles it is exact. Counts and masses are
integers, so neither the order of tiles, nor their size, nor the number of ranks changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Probabilities relative to the likeliest token in fixed point: 2**18 of them fit into 63 bits.
_MASS_BITS = 40


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

    def rows(self, chunk: slice) -> CandidateFilters:
        """Of some of the rows."""
        return CandidateFilters(*(None if x is None else x[chunk] for x in self))

    def in_use(self, vocab_size: int) -> Tensor:
        """[num_rows], bool: rows that have any."""
        used = []
        if self.top_k is not None:
            used.append(self.top_k < vocab_size)
        if self.top_p is not None:
            used.append(self.top_p < 1.0)
        if self.min_p is not None:
            used.append(self.min_p > 0.0)
        return torch.stack(used).any(dim=0)


class CandidateTile(NamedTuple):
    """Some ids of some rows.

    Attributes:
        first_id: The first of them.
        logits: [num_rows, num_ids], float32, of the candidate's distribution.
    """

    first_id: int
    logits: Tensor


# Each call sweeps over the tiles once more.
Tiles = Callable[[], Iterator[CandidateTile]]
Sum = Callable[[Tensor], Tensor]


def thresholds(
    tiles: Tiles, maximum: Tensor, filters: CandidateFilters, vocab_size: int, total: Sum
) -> Tensor:
    """The least logit that each row keeps, as an ordered key (:func:`ordered_keys`).

    In vLLM's order and with its definitions: min-p, then top-k of what it leaves, then top-p of
    what that leaves. Ties with the last token kept are kept.

    Args:
        tiles: Of this rank's ids.
        maximum: [num_rows], float32, the largest logit of each row, of all ranks.
        filters: One entry per row.
        vocab_size: Number of ids, of all ranks.
        total: Sums a tensor over the ranks.

    Returns:
        [num_rows], int64.
    """
    keys = torch.zeros(maximum.shape, dtype=torch.int64, device=maximum.device)
    if filters.min_p is not None:
        # At least this fraction of the likeliest token's probability.
        keys = ordered_keys(maximum + filters.min_p.log())
    if filters.top_k is not None:
        wanted = filters.top_k.long().clamp(1, vocab_size)
        kth = _select(tiles, wanted, _count, maximum, total)
        keys = torch.where(filters.top_k < vocab_size, torch.maximum(keys, kth), keys)
    if filters.top_p is not None:
        # The smallest set of likeliest tokens whose probability reaches p of what is left.
        kept = total(_mass_from(tiles, keys, maximum))
        wanted = (kept.double() * filters.top_p.double()).ceil().long().clamp(min=1)
        nucleus = _select(tiles, torch.minimum(wanted, kept), _mass, maximum, total)
        keys = torch.where(filters.top_p < 1.0, torch.maximum(keys, nucleus), keys)
    return keys


def draw_from(
    tiles: Tiles, keys: Tensor, noise: Callable[[int, int], Tensor]
) -> tuple[Tensor, Tensor]:
    """Gumbel-max over what the thresholds keep of this rank's ids.

    Args:
        tiles: Of this rank's ids.
        keys: [num_rows], int64, from :func:`thresholds`.
        noise: (num_ids, first_id) -> [num_rows, num_ids], float32.

    Returns:
        [num_rows] float32, the best score, and [num_rows] int64, its id.
    """
    best = torch.full(keys.shape, float("-inf"), device=keys.device)
    candidate = torch.zeros_like(keys)
    for first_id, logits in tiles():
        kept = ordered_keys(logits) >= keys[:, None]
        scores = torch.where(kept, logits + noise(logits.shape[1], first_id), float("-inf"))
        index = scores.argmax(dim=-1, keepdim=True)
        score = scores.gather(-1, index)[:, 0]
        better = score > best
        candidate = torch.where(better, index[:, 0] + first_id, candidate)
        best = torch.where(better, score, best)
    return best, candidate


def ordered_keys(values: Tensor) -> Tensor:
    """int64 in [0, 2**32) that compare as the float32 ``values`` do; both zeros are one."""
    bits = (values + 0.0).view(torch.int32)
    return torch.where(bits < 0, ~bits, bits ^ -(2**31)).long() & 0xFFFFFFFF


def _count(logits: Tensor, maximum: Tensor) -> Tensor:
    return torch.ones(logits.shape, dtype=torch.int64, device=logits.device)


def _mass(logits: Tensor, maximum: Tensor) -> Tensor:
    """[num_rows, num_ids], int64: probabilities relative to the likeliest, in fixed point."""
    return ((logits - maximum[:, None]).exp().double() * 2.0**_MASS_BITS).round().long()


def _mass_from(tiles: Tiles, keys: Tensor, maximum: Tensor) -> Tensor:
    """[num_rows], int64: of this rank's ids whose keys are at least ``keys``."""
    mass = torch.zeros_like(keys)
    for tile in tiles():
        kept = ordered_keys(tile.logits) >= keys[:, None]
        mass += torch.where(kept, _mass(tile.logits, maximum), 0).sum(dim=-1)
    return mass


def _select(
    tiles: Tiles,
    wanted: Tensor,
    weigh: Callable[[Tensor, Tensor], Tensor],
    maximum: Tensor,
    total: Sum,
) -> Tensor:
    """[num_rows], int64: the largest key such that what is at least it weighs ``wanted``."""
    prefix = torch.zeros_like(wanted)
    missing = wanted
    for shift in (24, 16, 8, 0):
        histogram = torch.zeros(len(wanted), 256, dtype=torch.int64, device=wanted.device)
        for tile in tiles():
            keys = ordered_keys(tile.logits)
            weight = torch.where(
                keys >> (shift + 8) == prefix[:, None], weigh(tile.logits, maximum), 0
            )
            histogram.scatter_add_(1, (keys >> shift) & 255, weight)
        histogram = total(histogram)
        # What a range and those above it weigh; the range wanted is the highest that suffices.
        above = histogram.flip(-1).cumsum(-1).flip(-1)
        digit = (above >= missing[:, None]).sum(dim=-1, keepdim=True).clamp(min=1) - 1
        missing = missing - (above - histogram).gather(-1, digit)[:, 0]
        prefix = (prefix << 8) | digit[:, 0]
    return prefix
