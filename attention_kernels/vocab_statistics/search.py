"""The largest threshold that keeps enough of a row, by counting and never by sorting."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attention_kernels.vocab_statistics.logits import ordered_keys

NUM_PIVOTS = 16
# The first sweep looks where thresholds are: up to so many nats below the largest logit, below
# which nothing is ever drawn beside it, and closest together near it.
_REACH = 26.0
# Each sweep leaves one of 17 pieces, so after the first these tell any two of 2**32 keys apart.
_NUM_MORE_SWEEPS = 8
LEAST_KEY = -(2**31)

# (pivots [num_rows, NUM_PIVOTS], bounds [num_rows, 2]) -> weights [num_rows, NUM_PIVOTS], as
# :func:`~attention_kernels.vocab_statistics.weigh` returns them, summed over ranks.
Weigh = Callable[[Tensor, Tensor], Tensor]


def largest_key(weigh: Weigh, wanted: Tensor, maximum: Tensor, active: Tensor) -> Tensor:
    """Return the largest key such that the ids at or above it weigh enough.

    Args:
        weigh: Sweeps over the rows.
        wanted: [num_rows], int64, at least 1: what is enough.
        maximum: [num_rows], float32, the largest logit of each row.
        active: [num_rows], bool: rows that are searched.

    Returns:
        [num_rows], int64: ``LEAST_KEY`` where even all ids are too few, and in rows that are not
        active.
    """
    ceiling = ordered_keys(maximum) + 1
    low = torch.full_like(wanted, LEAST_KEY)
    high = torch.where(active, ceiling, low + 1)
    # Of the ids at or above ``high``.
    settled = torch.zeros_like(wanted)
    part = torch.arange(1, NUM_PIVOTS + 1, device=wanted.device)
    distances = _REACH * (1 - part / NUM_PIVOTS) ** 2
    pivots = torch.minimum(ordered_keys(maximum[:, None] - distances), high[:, None])
    for _ in range(1 + _NUM_MORE_SWEEPS):
        weights = weigh(pivots, torch.stack([low, high], dim=1)) + settled[:, None]
        # Weights fall as pivots rise: the leading ones are enough.
        num_enough = (weights >= wanted[:, None]).sum(dim=1, keepdim=True)
        edges = torch.cat([low[:, None], pivots, high[:, None]], dim=1)
        settled = torch.cat([weights, settled[:, None]], dim=1).gather(1, num_enough)[:, 0]
        low = edges.gather(1, num_enough)[:, 0]
        high = edges.gather(1, num_enough + 1)[:, 0]
        pivots = low[:, None] + (high - low)[:, None] * part // (NUM_PIVOTS + 1)
    return low
