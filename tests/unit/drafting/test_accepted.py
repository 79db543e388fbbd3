"""What verifications kept, and which draft is better or worse."""

from __future__ import annotations

from statistics import fmean, pvariance
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.drafting.accepted import LEAST, Verifications, places_of_both

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=60)


def counters(lengths: list[int], longest: int = 9) -> tuple[int, dict[int, float]]:
    """What vLLM counts: each position of each verification that kept it."""
    kept = {at: float(sum(length > at for length in lengths)) for at in range(longest)}
    return len(lengths), kept


@given(LENGTHS)
def test_counters(lengths: list[int]) -> None:
    """Counters by position give back the histogram, its mean and its shares by position."""
    found = Verifications.from_counters(*counters(lengths))
    assert found == Verifications.of(lengths, 9)
    assert found.lengths == tuple(lengths.count(kept) for kept in range(10))
    assert found.number == len(lengths)
    assert found.tokens == pytest.approx(1 + sum(lengths) / len(lengths))
    expected = [sum(length > at for length in lengths) / len(lengths) for at in range(9)]
    assert found.by_position == pytest.approx(expected)


@pytest.mark.parametrize(
    ("verifications", "kept"),
    [(3, {0: 4.0}), (3, {0: 1.0, 1: 2.0}), (3, {0: 2.0, 2: 1.0}), (3, {1: 2.0})],
    ids=["more than all", "more behind", "a gap", "no first"],
)
def test_not_counters(verifications: int, kept: dict[int, float]) -> None:
    """Numbers that no server can have counted are refused."""
    with pytest.raises(ValueError, match="verifications cannot have kept"):
        Verifications.from_counters(verifications, kept)


def histogram(*counts: int) -> Verifications:
    """Verifications that kept 0, 1, ... tokens of the same draft."""
    lengths = [kept for kept, count in enumerate(counts) for _ in range(count)]
    return Verifications.of(lengths, len(counts) - 1)


def test_nothing() -> None:
    """Without a verification a step gives one token, and nothing is better."""
    nothing, something = Verifications(), histogram(0, 5)
    assert nothing.tokens == 1
    assert nothing.by_position == ()
    assert nothing.lengths == (0,)
    assert not something.is_better_than(nothing)
    assert not nothing.is_better_than(something)


def test_better() -> None:
    """More, beyond chance and by a margin."""
    poor, good = histogram(90, 10, 0, 0), histogram(10, 10, 10, 70)
    assert good.is_better_than(poor)
    assert not poor.is_better_than(good)
    assert not good.is_better_than(good)
    # One lucky answer each.
    assert not histogram(0, 0, 0, 1).is_better_than(histogram(1, 0, 0, 0))
    # As good as certain, and not worth a swap.
    slightly = histogram(10_000, 10_100), histogram(10_050, 10_050)
    assert not slightly[0].is_better_than(slightly[1])


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


KEPT = st.lists(st.integers(0, PLACES), min_size=1, max_size=40)


@given(st.lists(KEPT, min_size=1, max_size=5))
def test_drafts_of_one_length(steps: list[list[int]]) -> None:
    """Mean and its standard error, as of any sample."""
    counts = counted(*(step(PLACES, accepted) for accepted in steps))
    lengths = [length for accepted in steps for length in accepted]
    found = counts.yield_of(PLACES)
    assert counts.number == len(lengths)
    assert found.tokens == pytest.approx(1 + fmean(lengths))
    assert found.standard_error**2 == pytest.approx(pvariance(lengths) / len(lengths))


@given(st.lists(st.tuples(st.sampled_from([1, 3, 7]), KEPT), min_size=1, max_size=6))
def test_adaptive_drafts(steps: list[tuple[int, list[int]]]) -> None:
    """A token that was not drafted was not rejected: shares are of those that were."""
    cut = [(drafted, [min(length, drafted) for length in lengths]) for drafted, lengths in steps]
    counts = counted(*(step(*each) for each in cut))
    expected = reached = 1.0
    for place in range(PLACES):
        tested = [n for drafted, ns in cut if drafted > place for n in ns if n >= place]
        reached *= fmean(n > place for n in tested) if tested else 0.0
        expected += reached
    assert counts.yield_of(PLACES).tokens == pytest.approx(expected)


def test_worse() -> None:
    """Beyond chance, of the places that both drafted, and only with something to compare with."""
    good = counted(step(PLACES, [5, 6, 7, 4, 6] * 20))
    bad = counted(step(PLACES, [0, 1, 0, 0, 2] * 20))
    nearly = counted(step(PLACES, [5, 6, 7, 4, 5] * 20))
    assert bad.is_worse_than(good)
    assert not good.is_worse_than(bad)
    assert not good.is_worse_than(good)
    # A fifth of a token, with 0.11 and 0.10 of error.
    assert not nearly.is_worse_than(good)
    often = counted(*[step(PLACES, [5, 6, 7, 4, 5] * 20)] * 9)
    assert often.is_worse_than(counted(*[step(PLACES, [5, 6, 7, 4, 6] * 20)] * 9))
    assert counted(step(PLACES, [0] * 100)).is_worse_than(good)
    few = counted(step(PLACES, [7] * (LEAST - 1)))
    assert not bad.is_worse_than(few)
    assert not bad.is_worse_than(Verifications())


def test_shorter_drafts_are_not_worse() -> None:
    """An adaptive server drafts one token at a time under load, whichever draft it has."""
    long = counted(step(PLACES, [5, 6, 7, 4, 6] * 20))
    short = counted(step(1, [1] * 100))
    assert places_of_both(short, long) == 1
    assert not short.is_worse_than(long)
    assert counted(step(1, [0, 1] * 50)).is_worse_than(long)
