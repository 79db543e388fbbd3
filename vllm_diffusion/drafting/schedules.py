"""Schedules: the number of positions of a draft's block that each pass reveals.

A schedule gives the share of the block that is still masked after a share ``t`` of the passes. The
counts are differences of one falling sequence, so they sum to the block whatever they round to.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES: dict[str, Callable[[float], float]] = {
    # Few positions first, most in the last pass.
    "cosine": lambda t: math.cos(math.pi / 2 * t),
    "linear": lambda t: 1 - t,
    "sqrt": lambda t: math.sqrt(1 - t),
}


def unmask_counts(num_positions: int, steps: int, schedule: str) -> tuple[int, ...]:
    """Return the positions that each pass reveals: ``steps`` counts that sum to ``num_positions``.

    Args:
        num_positions: Number of masks of the block, without its anchor.
        steps: Passes over the block.
        schedule: A key of :data:`SCHEDULES`.

    Raises:
        ValueError: If the schedule is unknown, or has no pass or more passes than positions.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown; set it to one of {list(SCHEDULES)}.")
    if not 1 <= steps <= num_positions:
        raise ValueError(
            f"steps={steps} is not possible: each pass reveals at least one of the block's "
            f"{num_positions} positions; set steps to 1..{num_positions}."
        )
    counts = []
    masked = num_positions
    for step in range(1, steps + 1):
        share = SCHEDULES[schedule](step / steps)
        # Each later pass keeps at least one mask, and this pass reveals at least one.
        left = min(max(round(share * num_positions), steps - step), masked - 1)
        counts.append(masked - left)
        masked = left
    return tuple(counts)
