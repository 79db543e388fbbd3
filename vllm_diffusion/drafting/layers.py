"""Input of a DFlash draft: hidden states of a few layers of its target, side by side.

Source: z-lab's DFlash (arXiv:2602.06036).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def build_target_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Choose the layers of the target whose outputs a draft reads, one for each layer of the draft.

    A draft of one layer reads the middle layer; a deeper draft reads layers spread evenly from 1 to
    the third from the end. A configuration may name other layers, and any number of them.

    Args:
        num_target_layers: Number of layers of the target.
        num_draft_layers: Number of layers of the draft.

    Returns:
        Layer indices, rising, counted from 0.

    Raises:
        ValueError: If the target has too few layers for as many different ones.
    """
    if num_draft_layers < 1 or num_target_layers < 3:
        raise ValueError(
            f"num_draft_layers={num_draft_layers} and num_target_layers={num_target_layers}: a draft "
            "has at least 1 layer and its target at least 3."
        )
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    if num_draft_layers > last - first + 1:
        raise ValueError(
            f"num_draft_layers={num_draft_layers}: a target of {num_target_layers} layers has "
            f"{max(0, last - first + 1)} from layer 1 to the third from the end; take fewer, or name "
            "target_layer_ids."
        )
    gap = (last - first) / (num_draft_layers - 1)
    return [round(first + i * gap) for i in range(num_draft_layers)]


def check_target_layer_ids(layer_ids: Sequence[int], num_target_layers: int) -> None:
    """Raise ``ValueError`` unless a draft can read these layers of its target.

    A draft cannot read the last layer: ``transformers`` gives its output behind the model's last
    norm, vLLM before it.

    Args:
        layer_ids: ``dflash_config.target_layer_ids``.
        num_target_layers: Number of layers of the target.
    """
    known = range(num_target_layers - 1)
    wrong = [i for i in layer_ids if i not in known]
    if not layer_ids or wrong or len(set(layer_ids)) != len(layer_ids):
        raise ValueError(
            f"target_layer_ids={list(layer_ids)} must be different layers of a target that has "
            f"{num_target_layers}, each of 0..{num_target_layers - 2}."
        )


def context_rows(hidden_states: Sequence[Tensor], layer_ids: Sequence[int]) -> Tensor:
    """Concatenate the outputs of the target's layers ``layer_ids``.

    Args:
        hidden_states: Output of ``transformers`` with ``output_hidden_states``: the embeddings,
            then each layer's output, [..., hidden] each.
        layer_ids: Layers counted from 0, in the order in which the draft was trained.

    Returns:
        [..., len(layer_ids) * hidden].
    """
    # [0] are the embeddings.
    return torch.cat([hidden_states[i + 1] for i in layer_ids], dim=-1)
