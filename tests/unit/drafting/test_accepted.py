"""Histograms of what verifications kept, and which draft is better."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.drafting.accepted import AcceptedLengths

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=60)


def counters(lengths: list[int], longest: int = 9) -> tuple[int, dict[int, float]]:
    """What vLLM counts: each position of each verification that kept it."""
    kept = {at: float(sum(length > at for length in lengths)) for at in range(longest)}
    return len(lengths), kept


@given(LENGTHS)
def test_counters(lengths: list[int]) -> None:
    """Counters by position give back the histogram, its mean and its shares by position."""
    found = AcceptedLengths.from_counters(*counters(lengths))
    assert found.counts == tuple(lengths.count(kept) for kept in range(10))
    assert found.num_verifications == len(lengths)
    assert found.tokens_per_verification == pytest.approx(1 + sum(lengths) / len(lengths))
    expected = [sum(length > at for length in lengths) / len(lengths) for at in range(9)]
    assert found.by_position == pytest.approx(expected)
    same = AcceptedLengths.of(lengths)
    assert found.counts[: len(same.counts)] == same.counts
    assert not any(found.counts[len(same.counts) :])


@given(LENGTHS, LENGTHS)
def test_sum(first: list[int], second: list[int]) -> None:
    """Two histograms add up to that of both."""
    both = AcceptedLengths.of(first) + AcceptedLengths.of(second)
    assert both == AcceptedLengths.of(first + second)


@pytest.mark.parametrize(
    ("verifications", "kept"),
    [(3, {0: 4.0}), (3, {0: 1.0, 1: 2.0}), (3, {0: 2.0, 2: 1.0}), (3, {1: 2.0})],
    ids=["more than all", "more behind", "a gap", "no first"],
)
def test_not_counters(verifications: int, kept: dict[int, float]) -> None:
    """Numbers that no server can have counted are refused."""
    with pytest.raises(ValueError, match="verifications cannot have kept"):
        AcceptedLengths.from_counters(verifications, kept)


def test_nothing() -> None:
    """Without a verification a step gives one token, and nothing is better."""
    nothing, something = AcceptedLengths(), AcceptedLengths((0, 5))
    assert nothing.tokens_per_verification == 1
    assert nothing.by_position == ()
    assert not something.is_better_than(nothing)
    assert not nothing.is_better_than(something)


def test_better() -> None:
    """More, beyond chance and by a margin."""
    poor, good = AcceptedLengths((90, 10, 0, 0)), AcceptedLengths((10, 10, 10, 70))
    assert good.is_better_than(poor)
    assert not poor.is_better_than(good)
    assert not good.is_better_than(good)
    # One lucky answer each.
    assert not AcceptedLengths((0, 0, 0, 1)).is_better_than(AcceptedLengths((1, 0, 0, 0)))
    # As good as certain, and not worth a swap.
    slightly = AcceptedLengths((1_000_000, 1_010_000)), AcceptedLengths((1_005_000, 1_005_000))
    assert not slightly[0].is_better_than(slightly[1])
