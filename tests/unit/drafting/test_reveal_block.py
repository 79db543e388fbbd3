"""Schedules, and the order of equal confidences; ``test_model.py`` compares the passes with a sort
by hand.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.drafting.reveal_block import ORDERS, SCHEDULES, revealed, unmask_counts


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("confidence", [0.5, float("nan")])
def test_equals(confidence: float, order: str) -> None:
    """Among masks of equal confidence the leftmost are revealed, whatever the confidence of
    positions already revealed.
    """
    masked = torch.tensor([[False, True, False, True, True]])
    chosen = revealed(order, masked, torch.full((1, 5), confidence), 2)
    assert chosen.tolist() == [[False, True, False, True, False]]


@given(data=st.data(), num_positions=st.integers(1, 300), schedule=st.sampled_from(list(SCHEDULES)))
def test_counts_sum_to_the_block(data: st.DataObject, num_positions: int, schedule: str) -> None:
    """Every pass reveals at least one position, and the last one leaves no mask."""
    steps = data.draw(st.integers(1, num_positions))
    counts = unmask_counts(num_positions, steps, schedule)
    assert len(counts) == steps
    assert min(counts) >= 1
    assert sum(counts) == num_positions


@pytest.mark.parametrize(
    ("schedule", "counts"),
    [("cosine", (1, 4, 5, 6)), ("linear", (4, 4, 4, 4)), ("sqrt", (2, 3, 3, 8))],
)
def test_counts_follow_the_schedule(schedule: str, counts: tuple[int, ...]) -> None:
    """The counts of a block of 16 in 4 passes are the rounded differences of the schedule's masked
    share, worked out by hand.
    """
    assert unmask_counts(16, 4, schedule) == counts


@pytest.mark.parametrize("steps", [-1, 0, 8])
def test_impossible_steps_are_refused(steps: int) -> None:
    """Steps outside 1 to the positions of a block are refused with that range."""
    with pytest.raises(ValueError, match=rf"steps={steps} .*7 positions; set steps to 1\.\.7"):
        unmask_counts(7, steps, "cosine")


def test_unknown_schedule_is_refused() -> None:
    """An unknown schedule is refused with the known ones."""
    with pytest.raises(ValueError, match=r"schedule='quadratic' .*'cosine', 'linear', 'sqrt'"):
        unmask_counts(7, 2, "quadratic")
