"""LoRA adapters in plain PyTorch: a pair of matrix products for each adapter in the pass.

vLLM's own products for CPUs gather each row's matrices, which takes a matrix of memory for every
row, and it has none for experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora import layers
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

from vllm_diffusion.cpu.linear import linear
from vllm_diffusion.hooks.replacement import replaces


class RowsByAdapter(PunicaWrapperCPU):
    """Adapter of each row of a pass, and the products with it."""

    def update_metadata(
        self,
        mapping: Any,
        lora_index_to_id: list[int | None],
        max_loras: int,
        vocab_size: int,
        **kwargs: Any,
    ) -> None:
        """Write each row's slot; segments of equal rows, of which vLLM's products are made, are
        not.
        """
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)

    def for_each_adapter(self, rows: Tensor, work: Callable[[int, Tensor], None]) -> None:
        """Call ``work`` with each slot that some of ``rows`` have, and which of them.

        Args:
            rows: [num_rows], int64: rows of the pass.
            work: A slot and [n], int64, indices into ``rows`` in; nothing out.
        """
        slot_of_row = self.token_lora_indices[rows]
        for slot in slot_of_row.unique().tolist():
            if slot >= 0:
                work(slot, torch.where(slot_of_row == slot)[0])

    def add_shrink(
        self,
        y: Any,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        scale: float,
        **kwargs: Any,
    ) -> None:
        """Write ``x`` times each row's first matrices into ``y``, a float32 buffer for each
        slice.
        """
        x = x.view(-1, x.shape[-1]).float()

        def shrink(slot: int, rows: Tensor) -> None:
            for buffer, lora_a in zip(y, lora_a_stacked, strict=True):
                product = linear(x[rows], lora_a[slot, 0].float())
                buffer[rows, : product.shape[1]] = scale * product

        self.for_each_adapter(torch.arange(x.shape[0]), shrink)

    def add_expand(
        self,
        y: Tensor,
        x: Any,
        lora_b_stacked: tuple[Tensor, ...],
        output_slices: tuple[int, ...],
        offset_start: int = 0,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """Add each slice of ``x`` times its rows' second matrices to its columns of ``y``."""
        y = y.view(-1, y.shape[-1])

        def expand(slot: int, rows: Tensor) -> None:
            start = offset_start
            for buffer, lora_b, size in zip(x, lora_b_stacked, output_slices, strict=True):
                product = linear(buffer[rows], lora_b[slot, 0].float()).to(y.dtype)
                columns = slice(start, start + size)
                y[rows, columns] = y[rows, columns] + product if add_inputs else product
                start += size

        self.for_each_adapter(torch.arange(y.shape[0]), expand)


@dataclass(frozen=True)
class ExpertAdapters:
    """LoRA matrices of a layer's experts, with the adapter of each row.

    Attributes:
        rows_by_adapter: Adapters of the pass's rows.
        gate_up: Matrices A and B, [slots, experts, ...] each: one pair for both halves, or a pair
            each.
        down: Matrices A and B of the second product.
    """

    rows_by_adapter: RowsByAdapter
    gate_up: tuple[tuple[Tensor, Tensor], ...]
    down: tuple[tuple[Tensor, Tensor], ...]

    def add(
        self,
        pairs: tuple[tuple[Tensor, Tensor], ...],
        expert: int,
        rows: Tensor,
        x: Tensor,
        y: Tensor,
    ) -> Tensor:
        """An expert's product with its adapters'.

        Args:
            pairs: ``gate_up`` or ``down``.
            expert: Its index.
            rows: [num_rows], int64: the rows of the pass that chose it.
            x: [num_rows, in_features].
            y: [num_rows, out_features], the product of the expert alone; changed in place.

        Returns:
            ``y``.
        """

        def add(slot: int, some: Tensor) -> None:
            parts = [
                linear(linear(x[some].float(), a[slot, expert].float()), b[slot, expert].float())
                for a, b in pairs
            ]
            y[some] = y[some] + torch.cat(parts, dim=-1).to(y.dtype)

        self.rows_by_adapter.for_each_adapter(rows, add)
        return y


class _ExpertsOnCpu:
    """Mixin that precedes vLLM's layers, whose constructor and mapping are for GPU kernels."""

    def __init__(self, base_layer: Any) -> None:
        BaseLayerWithLoRA.__init__(self)
        self.base_layer = base_layer
        self.moe_config = base_layer.moe_config
        # vLLM finds the layers of shared experts under this name too.
        self._shared_experts = base_layer._shared_experts
        parallel = self.moe_config.moe_parallel_config
        self.tp_size, self.tp_rank = parallel.tp_size, parallel.tp_rank
        self.device = torch.device("cpu")
        self.enable_moe_shared_loras = False
        self._w13_slices = 1 if isinstance(self, layers.FusedMoE3DWithLoRA) else 2
        self.n_slices = self.moe_config.num_local_experts * (self._w13_slices + 1)
        # What loads the layer's own weights looks for them under this name.
        base_layer.routed_experts.lora_base_layer_prefix = "base_layer."

    def set_mapping(self, punica_wrapper: Any) -> None:
        BaseLayerWithLoRA.set_mapping(self, punica_wrapper)
        of_layer: Any = self
        if of_layer.fully_sharded and self.tp_size > 1:
            # Adapters of experts are refused then: the halves would have to be gathered.
            return
        of_layer.base_layer.routed_experts.adapters = ExpertAdapters(
            punica_wrapper,
            tuple(zip(of_layer.w13_lora_a_stacked, of_layer.w13_lora_b_stacked, strict=True)),
            tuple(zip(of_layer.w2_lora_a_stacked, of_layer.w2_lora_b_stacked, strict=True)),
        )


# vLLM asks for both by the name of the class.
class FusedMoEWithLoRA(_ExpertsOnCpu, layers.FusedMoEWithLoRA):
    """Experts with three matrices each."""


class FusedMoE3DWithLoRA(_ExpertsOnCpu, layers.FusedMoE3DWithLoRA):
    """Experts whose first two matrices are one."""


def register() -> None:
    """Make vLLM wrap experts in the layers above. Safe to call twice."""
    _with_experts_on_cpu.install()


@replaces(
    "vllm.lora.utils:_all_lora_classes",
    reason="vLLM wraps layers in the classes of this list; experts on the CPU are wrapped in ours.",
    until="A platform or a model may register its classes of layers with adapters.",
)
def _with_experts_on_cpu(stock: tuple[type, ...]) -> tuple[type, ...]:
    ours = {
        layers.FusedMoEWithLoRA: FusedMoEWithLoRA,
        layers.FusedMoE3DWithLoRA: FusedMoE3DWithLoRA,
    }
    return tuple(ours.get(cls, cls) for cls in stock)
