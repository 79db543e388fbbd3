"""Records the inputs and outputs of every quantized layer of an engine's model."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
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

    def record(name: str, _: nn.Module, args: Any, output: Any) -> None:
        rows = output[0] if isinstance(output, tuple) else output
        records[name].append((args[0].clone(), rows.clone()))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if ".layers." in name and name.rpartition(".")[2] in PARTS:
                hook = module.register_forward_hook(partial(record, name))
                hooks.callback(hook.remove)
        yield records


@contextmanager
def recorded_experts(num_layers: int) -> Iterator[dict[int, list[tuple[Tensor, ...]]]]:
    """Record (rows, expert weights, expert ids, output) of each pass, by layer."""
    from vllm_diffusion.cpu.experts import TorchQuantizedExperts

    records: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)
    calls = 0
    original = TorchQuantizedExperts.apply

    def apply(this: Any, **given: Any) -> None:
        nonlocal calls
        original(this, **given)
        names = ("hidden_states", "topk_weights", "topk_ids", "output")
        records[calls % num_layers].append(tuple(given[name].clone() for name in names))
        calls += 1

    with mock.patch.object(TorchQuantizedExperts, "apply", apply):
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
