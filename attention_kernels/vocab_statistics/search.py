"""The largest threshold that keeps enough of a row, by counting and never by sorting."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.vocab_statistics.logits import ordered_keys

NUM_PIVOTS = 16
# The first sweep looks where thresholds are: up to so many nats below the largest logit, below
# which nothing is ever drawn next to it, and closest together near it.
_REACH = 26.0
# Each sweep leaves one of 17 pieces, so after the first these tell any two of 2**32 keys apart.
_NUM_MORE_SWEEPS = 8
LEAST_KEY = -(2**31)

# (pivots [num_rows, NUM_PIVOTS], bounds [num_rows, 2]) -> weights [num_rows, NUM_PIVOTS], as
# :func:`~attention_kernels.vocab_statistics.weigh` returns them, summed over ranks.
Weigh = Callable[[Tensor, Tensor], Tensor]


class Piece(NamedTuple):
    """Piece of the keys that holds each row's threshold; each sweep narrows it in place.

    Attributes:
        bounds: [num_rows, 2], int64, the first key of the piece and the one after its last.
        pivots: [num_rows, NUM_PIVOTS], int64, keys at which the next sweep cuts it, ascending.
        settled: [num_rows], int64, weight of the ids after the piece.
    """

    bounds: Tensor
    pivots: Tensor
    settled: Tensor

    @staticmethod
    def below(maximum: Tensor, active: Tensor) -> Piece:
        """Return all keys up to the largest; no key in rows that are not active.

        Args:
            maximum: [num_rows], float32, the largest logit of each row.
            active: [num_rows], bool.
        """
        low = torch.full(maximum.shape, LEAST_KEY, dtype=torch.int64, device=maximum.device)
        high = torch.where(active, ordered_keys(maximum) + 1, low + 1)
        part = torch.arange(1, NUM_PIVOTS + 1, device=maximum.device)
        distances = _REACH * (1 - part / NUM_PIVOTS) ** 2
        pivots = torch.minimum(ordered_keys(maximum[:, None] - distances), high[:, None])
        return Piece(torch.stack([low, high], dim=1), pivots, torch.zeros_like(low))


# (piece, weights [num_rows, NUM_PIVOTS], wanted [num_rows]): narrows the piece.
Narrow = Callable[[Piece, Tensor, Tensor], None]


def search(weigh: Weigh, narrow: Narrow, piece: Piece, wanted: Tensor) -> Tensor:
    """Narrow a piece until it is one key.

    Args:
        weigh: Sweeps over the rows.
        narrow: Chooses the part of a piece that holds the threshold.
        piece: Where the thresholds are.
        wanted: [num_rows], int64, at least 1: what is enough.

    Returns:
        [num_rows], int64, the keys.
    """
    for _ in range(1 + _NUM_MORE_SWEEPS):
        narrow(piece, weigh(piece.pivots, piece.bounds), wanted)
    return piece.bounds[:, 0]
