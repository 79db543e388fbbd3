"""Which of two drafts is worse, by what a server counts."""

from __future__ import annotations

from statistics import fmean, pvariance
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.training.draft_trial import (
    LEAST,
    Verifications,
    is_worse,
    places_of_both,
    yield_of,
)

PLACES = 7


def step(num_drafted: int, accepted: list[int]) -> Any:
    """vLLM's counters of a step whose drafts are alike in length."""
    return SimpleNamespace(
        num_drafts=len(accepted),
        num_draft_tokens_per_pos=[len(accepted) * (place < num_drafted) for place in range(PLACES)],
        num_accepted_tokens_per_pos=[sum(n > place for n in accepted) for place in range(PLACES)],
    )


def counted(*steps: Any) -> Verifications:
    total = Verifications()
    for each in steps:
        total += Verifications.of_step(each)
    return total


LENGTHS = st.lists(st.integers(0, PLACES), min_size=1, max_size=40)


@given(st.lists(LENGTHS, min_size=1, max_size=5))
def test_drafts_of_one_length(steps: list[list[int]]) -> None:
    """Mean and its standard error, as of any sample."""
    counts = counted(*(step(PLACES, accepted) for accepted in steps))
    lengths = [length for accepted in steps for length in accepted]
    found = yield_of(counts, PLACES)
    assert counts.number == len(lengths)
    assert found.tokens == pytest.approx(1 + fmean(lengths))
    assert found.standard_error**2 == pytest.approx(pvariance(lengths) / len(lengths))


@given(st.lists(st.tuples(st.sampled_from([1, 3, 7]), LENGTHS), min_size=1, max_size=6))
def test_adaptive_drafts(steps: list[tuple[int, list[int]]]) -> None:
    """A token that was not drafted was not rejected: shares are of those that were."""
    cut = [(drafted, [min(length, drafted) for length in lengths]) for drafted, lengths in steps]
    counts = counted(*(step(*each) for each in cut))
    expected = reached = 1.0
    for place in range(PLACES):
        tested = [n for drafted, ns in cut if drafted > place for n in ns if n >= place]
        reached *= fmean(n > place for n in tested) if tested else 0.0
        expected += reached
    assert yield_of(counts, PLACES).tokens == pytest.approx(expected)


def test_worse() -> None:
    """Beyond chance, of the places that both drafted, and only with something to compare with."""
    good = counted(step(PLACES, [5, 6, 7, 4, 6] * 20))
    bad = counted(step(PLACES, [0, 1, 0, 0, 2] * 20))
    nearly = counted(step(PLACES, [5, 6, 7, 4, 5] * 20))
    assert is_worse(bad, good)
    assert not is_worse(good, bad)
    assert not is_worse(good, good)
    # A fifth of a token, with 0.11 and 0.10 of error.
    assert not is_worse(nearly, good)
    assert is_worse(
        counted(*[step(PLACES, [5, 6, 7, 4, 5] * 20)] * 9),
        counted(*[step(PLACES, [5, 6, 7, 4, 6] * 20)] * 9),
    )
    assert is_worse(counted(step(PLACES, [0] * 100)), good)
    few = counted(step(PLACES, [7] * (LEAST - 1)))
    assert not is_worse(bad, few)
    assert not is_worse(bad, Verifications())


def test_shorter_drafts_are_not_worse() -> None:
    """An adaptive server drafts one token at a time under load, whichever draft it has."""
    long = counted(step(PLACES, [5, 6, 7, 4, 6] * 20))
    short = counted(step(1, [1] * 100))
    assert places_of_both(short, long) == 1
    assert not is_worse(short, long)
    assert is_worse(counted(step(1, [0, 1] * 50)), long)
