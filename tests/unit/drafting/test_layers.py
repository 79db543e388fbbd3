"""Which hidden states of its target a draft reads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.drafting.layers import (
    build_target_layer_ids,
    check_target_layer_ids,
    context_rows,
)


@pytest.mark.parametrize(
    ("num_target_layers", "num_draft_layers", "expected"),
    [
        (64, 4, [1, 21, 41, 61]),
        (36, 5, [1, 9, 17, 25, 33]),
        (36, 1, [18]),
        (4, 1, [2]),
        (28, 2, [1, 25]),
        (6, 3, [1, 2, 3]),
    ],
)
def test_build_target_layer_ids(num_target_layers, num_draft_layers, expected) -> None:
    """Published drafts' layers: 1 to the third from the end, evenly; the middle one for one layer."""
    assert build_target_layer_ids(num_target_layers, num_draft_layers) == expected


@given(st.integers(-2, 100), st.integers(-2, 40))
def test_build_target_layer_ids_fit(num_target_layers: int, num_draft_layers: int) -> None:
    """Either an error that names what was wrong, or different layers that the target has."""
    few = num_draft_layers < 1 or num_target_layers < 3
    if few or (num_draft_layers > 1 and num_draft_layers > num_target_layers - 3):
        with pytest.raises(ValueError, match=f"num_draft_layers={num_draft_layers}"):
            build_target_layer_ids(num_target_layers, num_draft_layers)
        return
    ids = build_target_layer_ids(num_target_layers, num_draft_layers)
    assert ids == sorted(set(ids))
    assert len(ids) == num_draft_layers
    check_target_layer_ids(ids, num_target_layers)


@pytest.mark.parametrize("layer_ids", [[], [3], [-1], [1, 1], [0, 7]])
def test_check_target_layer_ids(layer_ids: list[int]) -> None:
    """The last layer's output is not the same in transformers and vLLM, and none is read twice."""
    with pytest.raises(ValueError, match="target_layer_ids"):
        check_target_layer_ids(layer_ids, 4)


def test_context_rows() -> None:
    """Layer 0's output is the entry behind the embeddings."""
    states = [torch.full((2, 3), float(i)) for i in range(5)]
    rows = context_rows(states, [0, 2])
    assert rows.tolist() == [[1.0] * 3 + [3.0] * 3] * 2
