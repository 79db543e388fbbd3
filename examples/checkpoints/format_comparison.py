"""What quantising costs: the same prompts through several checkpoints of one model, in vLLM.

Used by ``evaluate.py --compare``. Per checkpoint: exact matches with a 95 % interval, recovery (its
matches in percent of the first checkpoint's, with a paired bootstrap interval), denoise steps a
canvas, and on the first step of each prompt, where every checkpoint starts from the same canvas:
how often the argmax is the first checkpoint's, and the KL of the distributions from it.
"""

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


def wilson_interval(num_correct: int, num_trials: int, z: float = 1.96) -> tuple[float, float]:
    """Confidence interval of a proportion (E. B. Wilson, 1927); 95 % at the default ``z``."""
    if num_trials == 0:
        return 0.0, 1.0
    p, z2n = num_correct / num_trials, z * z / num_trials
    centre = (p + z2n / 2) / (1 + z2n)
    half = z * math.sqrt(p * (1 - p) / num_trials + z2n / (4 * num_trials)) / (1 + z2n)
    return max(0.0, centre - half), min(1.0, centre + half)


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


def table(runs: list[FormatRun]) -> str:
    """The comparison; the first run is what the others are compared with."""
    lines = []
    base = runs[0]
    for run in runs:
        low, high = wilson_interval(sum(run.right), len(run.right))
        line = (
            f"{run.name:<16} right {sum(run.right) / len(run.right):6.1%} [{low:.1%}, {high:.1%}] "
            f"of {len(run.right)}  steps/canvas {run.steps_per_canvas:.2f}"
        )
        if run is not base:
            percent, low, high = recovery(base.right, run.right)
            positions = [
                pair
                for theirs, ours in zip(base.first_steps, run.first_steps, strict=True)
                for pair in zip(theirs, ours, strict=True)
            ]
            same = sum(max(p, key=p.__getitem__) == max(q, key=q.__getitem__) for p, q in positions)
            nats = sum(divergence(p, q) for p, q in positions)
            line += (
                f"  recovery {percent:.1f} % [{low:.1f}, {high:.1f}]"
                f"  first step: same argmax {same / len(positions):.1%}, "
                f"KL {nats / len(positions):.4f} nats"
            )
        lines.append(line)
    return "\n".join(lines)
