"""Reveal orders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from vllm_diffusion.drafting.reveal import (
    CONFIDENCE,
    ORDERS,
    likeliest,
    revealed,
    without_mask_token,
)
from vllm_diffusion.drafting.schedules import SCHEDULES, unmask_counts


def by_hand(order: str, masked: list[bool], confidence: list[float], count: int) -> list[int]:
    places = [i for i, is_masked in enumerate(masked) if is_masked]
    if order == CONFIDENCE:
        places.sort(key=lambda i: -confidence[i])
    return sorted(places[:count])


@settings(deadline=None)
@given(
    data=st.data(),
    num_reqs=st.integers(0, 5),
    num_positions=st.integers(1, 12),
    order=st.sampled_from(ORDERS),
    schedule=st.sampled_from(list(SCHEDULES)),
)
def test_passes_reveal_every_position_once(
    data: st.DataObject, num_reqs: int, num_positions: int, order: str, schedule: str
) -> None:
    """Each pass reveals what a sort by hand does, ties and NaN included, and none stays masked."""
    steps = data.draw(st.integers(1, num_positions))
    masked = torch.ones(num_reqs, num_positions, dtype=torch.bool)
    levels = st.sampled_from([0.0, 0.25, 0.5, 1.0])
    for count in unmask_counts(num_positions, steps, schedule):
        rows = [[data.draw(levels) for _ in range(num_positions)] for _ in range(num_reqs)]
        confidence = torch.tensor(rows).reshape(num_reqs, num_positions)
        chosen = revealed(order, masked, confidence, count)
        for row in range(num_reqs):
            expected = by_hand(order, masked[row].tolist(), rows[row], count)
            assert chosen[row].nonzero().flatten().tolist() == expected
        masked &= ~chosen
    assert not masked.any()


@pytest.mark.parametrize("order", ORDERS)
def test_nan_confidence_reveals_masks_only(order: str) -> None:
    masked = torch.tensor([[True, False, True, True]])
    chosen = revealed(order, masked, torch.full((1, 4), float("nan")), 2)
    assert int(chosen.sum()) == 2
    assert not (chosen & ~masked).any()


@given(seed=st.integers(0, 2**31), mask=st.integers(0, 6))
def test_mask_token_is_never_likeliest(seed: int, mask: int) -> None:
    """Not where its logit is the largest; probabilities are those of the other tokens."""
    logits = torch.randn(3, 4, 7, generator=torch.Generator().manual_seed(seed))
    logits[..., mask] = 50.0
    others = [i for i in range(7) if i != mask]
    expected = logits[..., others].softmax(dim=-1).max(dim=-1)
    tokens, probability = likeliest(without_mask_token(logits, mask))
    assert torch.equal(tokens, torch.tensor(others)[expected.indices])
    torch.testing.assert_close(probability, expected.values)


@pytest.mark.parametrize("order", ORDERS)
def test_a_graph_can_hold_it(order: str) -> None:
    """Traced whole: no branch on values, nothing read back; the trace does not know how many requests."""

    def step(logits: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        _, confidence = likeliest(without_mask_token(logits, 0))
        return revealed(order, masked, confidence, 2)

    traced = make_fx(step, tracing_mode="symbolic")(
        torch.randn(3, 4, 7), torch.ones(3, 4, dtype=torch.bool)
    )
    logits = torch.randn(5, 4, 7)
    masked = torch.ones(5, 4, dtype=torch.bool)
    assert torch.equal(traced(logits.clone(), masked), step(logits, masked))
