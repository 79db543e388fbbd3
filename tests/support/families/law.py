"""The law of tokens that are drawn, and whether answers follow it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from scipy.stats import chisquare
from torch import Tensor


def outcomes(law: Callable[[list[int]], Tensor], length: int) -> dict[tuple[int, ...], float]:
    """Every sequence of that many tokens with its probability.

    Args:
        law: Probabilities [V] of the token behind the ones given.
        length: Tokens.
    """
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        found = {
            (*said, token): p * float(share)
            for said, p in found.items()
            for token, share in enumerate(law(list(said)))
            if share > 0
        }
    return found


def check_law(expected: dict[tuple[int, ...], float], answers: Sequence[tuple[int, ...]]) -> None:
    """The answers are as frequent as expected; one run in a thousand would fail with other seeds."""
    counts = Counter(answers)
    assert counts.keys() <= expected.keys()
    frequencies = [p * len(answers) for p in expected.values()]
    assert chisquare([counts[one] for one in expected], frequencies).pvalue > 1e-3
