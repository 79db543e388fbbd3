"""What quantising costs: the same prompts through several checkpoints of one model, in vLLM.

Used by ``evaluate.py --compare``. Per checkpoint: exact matches with a 95 % interval, recovery (its
matches in percent of the first checkpoint's, with a paired bootstrap interval), denoise steps a
canvas, and on the first step of each prompt, where every checkpoint starts from the same canvas:
how often the argmax is the first checkpoint's, and the KL of the distributions from it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

# A position's distribution: vocabulary id -> log-probability; all of a small vocabulary.
Distribution = dict[int, float]


@dataclass(frozen=True)
class FormatRun:
    """One checkpoint's answers.

    Attributes:
        name: What it is called in the output.
        right: Whether each prompt was answered exactly.
        steps_per_canvas: Mean denoise steps.
        first_steps: Per prompt, the distribution of each position after one step.
    """

    name: str
    right: list[bool]
    steps_per_canvas: float
    first_steps: list[list[Distribution]]


def divergence(reference: Distribution, other: Distribution) -> float:
    """KL of ``other`` from ``reference``, nats; what one of the two does not list is one outcome.

    With the whole vocabulary listed this is the KL; otherwise it is a lower bound.
    """
    common = reference.keys() & other.keys()
    total = sum(math.exp(reference[t]) * (reference[t] - other[t]) for t in common)
    rest_p = 1 - sum(math.exp(reference[t]) for t in common)
    rest_q = 1 - sum(math.exp(other[t]) for t in common)
    # Below that a rest is rounding.
    if rest_p > 1e-12 and rest_q > 1e-12:
        total += rest_p * math.log(rest_p / rest_q)
    return max(total, 0.0)


def argmax_agreement(reference: FormatRun, other: FormatRun) -> float:
    """Share of the first steps' positions with the same most likely token."""
    pairs = _positions(reference, other)
    return sum(max(p, key=p.__getitem__) == max(q, key=q.__getitem__) for p, q in pairs) / len(
        pairs
    )


def mean_divergence(reference: FormatRun, other: FormatRun) -> float:
    """Mean KL over the first steps' positions, nats."""
    pairs = _positions(reference, other)
    return sum(divergence(p, q) for p, q in pairs) / len(pairs)


def _positions(reference: FormatRun, other: FormatRun) -> list[tuple[Distribution, Distribution]]:
    return [
        pair
        for theirs, ours in zip(reference.first_steps, other.first_steps, strict=True)
        for pair in zip(theirs, ours, strict=True)
    ]


def recovery(
    reference: Sequence[bool], other: Sequence[bool], resamples: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Right answers in percent of the reference's, and a 95 % interval.

    The interval is a paired bootstrap: prompts are drawn again, with both answers to each.
    """
    pairs = list(zip(reference, other, strict=True))
    rng = random.Random(seed)

    def ratio(sample: Sequence[tuple[bool, bool]]) -> float:
        base = sum(one for one, _ in sample)
        return 100 * sum(two for _, two in sample) / base if base else math.nan

    ratios = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(resamples))
    return ratio(pairs), ratios[int(0.025 * resamples)], ratios[int(0.975 * resamples)]


def table(runs: list[FormatRun], interval) -> str:
    """The comparison; the first run is what the others are compared with.

    Args:
        runs: In order.
        interval: (number right, number of prompts) -> its 95 % interval.
    """
    lines = []
    base = runs[0]
    for run in runs:
        low, high = interval(sum(run.right), len(run.right))
        line = (
            f"{run.name:<16} right {sum(run.right) / len(run.right):6.1%} [{low:.1%}, {high:.1%}] "
            f"of {len(run.right)}  steps/canvas {run.steps_per_canvas:.2f}"
        )
        if run is not base:
            percent, low, high = recovery(base.right, run.right)
            line += (
                f"  recovery {percent:.1f} % [{low:.1f}, {high:.1f}]"
                f"  first step: same argmax {argmax_agreement(base, run):.1%}, "
                f"KL {mean_divergence(base, run):.4f} nats"
            )
        lines.append(line)
    return "\n".join(lines)
