"""How many tokens verifications accepted, and which draft is better."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.drafting.accepted import Verifications

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=60)


@given(LENGTHS)
def test_counts(lengths: list[int]) -> None:
    """Counts by position give back the mean number of tokens and the shares by position."""
    found = Verifications.of(lengths, 9)
    assert found.number == len(lengths)
    assert found.tokens == pytest.approx(1 + sum(lengths) / len(lengths))
    expected = [sum(length > at for length in lengths) / len(lengths) for at in range(9)]
    assert found.by_position == pytest.approx(expected)


def histogram(*counts: int) -> Verifications:
    """Return verifications of one draft of which ``counts`` accepted 0, 1, ... tokens."""
    lengths = [kept for kept, count in enumerate(counts) for _ in range(count)]
    return Verifications.of(lengths, len(counts) - 1)


def test_nothing() -> None:
    """Without any verification a step gives one token, and no draft is better than another."""
    nothing = Verifications()
    assert nothing.tokens == 1
    assert nothing.by_position == ()
    assert not nothing.is_better_than(nothing)
    assert not nothing.is_better_than(histogram(0, 5))


def test_better() -> None:
    """A draft is better than another if it gives at least 2 % more tokens per verification."""
    poor, good = histogram(90, 10, 0, 0), histogram(10, 10, 10, 70)
    assert good.is_better_than(poor)
    assert not poor.is_better_than(good)
    assert not good.is_better_than(good)
    assert histogram(49, 51).is_better_than(histogram(53, 47))
    assert not histogram(50, 50).is_better_than(histogram(52, 48))
