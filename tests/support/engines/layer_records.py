"""Records the inputs and outputs of every quantized layer of an engine's model."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

# A quantised layer of the engine -> the checkpoint's modules that it holds, in order.
PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "o_proj": ("o_proj",),
    "down_proj": ("down_proj",),
}


@contextmanager
def recorded_linears(model: nn.Module) -> Iterator[dict[str, list[tuple[Tensor, Tensor]]]]:
    """Record input and output of each pass, by the layer's name in the engine."""
    records: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
    hooks = []
    for name, module in model.named_modules():
        if ".layers." not in name or name.rpartition(".")[2] not in PARTS:
            continue

        def record(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
            rows = output[0] if isinstance(output, tuple) else output
            records[name].append((args[0].clone(), rows.clone()))

        hooks.append(module.register_forward_hook(record))
    try:
        yield records
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def recorded_experts(num_layers: int) -> Iterator[dict[int, list[tuple[Tensor, ...]]]]:
    """Record (rows, expert weights, expert ids, output) of each pass, by layer."""
    from vllm_diffusion.cpu.experts import TorchQuantizedExperts

    records: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)
    calls = 0
    original = TorchQuantizedExperts.apply

    def apply(
        this: Any,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        nonlocal calls
        original(this, output, hidden_states, w1, w2, topk_weights, topk_ids, *args, **kwargs)
        records[calls % num_layers].append(
            (hidden_states.clone(), topk_weights.clone(), topk_ids.clone(), output.clone())
        )
        calls += 1

    def keywords(this: Any, **kwargs: Any) -> None:
        names = ("output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids")
        apply(this, *(kwargs.pop(name) for name in names), **kwargs)

    with mock.patch.object(TorchQuantizedExperts, "apply", keywords):
        yield records


def reference_linear(layers: Any, name: str, x: Tensor) -> Tensor:
    """Return the reference's output for an engine's layer: its modules side by side."""
    owner, _, kind = name.partition("layers.")[2].rpartition(".")
    block = layers.get_submodule(owner)
    dtype = next(block.parameters()).dtype
    rows = x.to(dtype)[None]
    outputs = []
    for part in PARTS[kind]:
        # A full-attention layer has no v_proj: its values are its keys.
        module = getattr(block, part, None)
        outputs.append((block.k_proj if module is None else module)(rows)[0])
    return torch.cat(outputs, dim=-1)
