"""The order of equals; that passes reveal what a sort by hand does, and no mask, is in ``test_model.py``."""

from __future__ import annotations

import pytest
import torch

from vllm_diffusion.drafting.reveal import ORDERS, revealed


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("confidence", [0.5, float("nan")])
def test_equals(confidence: float, order: str) -> None:
    """The leftmost masks, whatever the confidence of what is revealed already."""
    masked = torch.tensor([[False, True, False, True, True]])
    chosen = revealed(order, masked, torch.full((1, 5), confidence), 2)
    assert chosen.tolist() == [[False, True, False, True, False]]
