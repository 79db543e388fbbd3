"""The LoRA of drafts on a model's layers.

Passes hold rows of drafts beside rows that are verified, and rows of prompts, so it is added row by
row: to rows of drafts alone, and to the bit nothing else changes. With tensor parallelism a rank adds
what its part of the input gives, before the ranks are summed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.models.utils import PPMissingLayer

from vllm_diffusion.families.nemotron.draft_lora import TENSOR_NAME, DraftLora


class _AdaptedLinearMethod(LinearMethodBase):
    """A layer's own method, and in rows of drafts the LoRA on top."""

    def __init__(self, base: LinearMethodBase, scale: float) -> None:
        self.base = base
        self.scale = scale

    def create_weights(self, *args: Any, **kwargs: Any) -> None:
        self.base.create_weights(*args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.base.process_weights_after_loading(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = self.base.apply(layer, x, bias)
        added = nn.functional.linear(
            nn.functional.linear(x, layer.draft_lora_a), layer.draft_lora_b
        )
        is_draft = layer.is_draft_row[: x.shape[0], None]
        return torch.where(is_draft, output + self.scale * added, output)


class DraftAdapter:
    """The LoRA on a model's layers.

    Attributes:
        is_draft_row: [max_num_tokens], bool: rows of the pass that it acts on, at an address that
            never changes.
    """

    def __init__(self, lora: DraftLora, layers: Iterable[Any], max_num_tokens: int) -> None:
        """Adapt each layer of this pipeline stage; the added product is zero until :meth:`load`.

        Args:
            lora: Adapter to add.
            layers: Layers of the whole model; layers of other stages are vLLM's placeholders.
            max_num_tokens: Largest number of tokens of a pass.
        """
        self._lora = lora
        # Projections by the layer's number.
        self._projections = {
            i: layer.self_attn.o_proj
            for i, layer in enumerate(layers)
            if not isinstance(layer, PPMissingLayer)
        }
        self.is_draft_row = torch.zeros(max_num_tokens, dtype=torch.bool)
        for projection in self._projections.values():
            down = torch.zeros(lora.rank, projection.input_size_per_partition)
            up = torch.zeros(projection.output_size, lora.rank)
            for name, buffer in (
                ("draft_lora_a", down.to(projection.params_dtype)),
                ("draft_lora_b", up.to(projection.params_dtype)),
                ("is_draft_row", self.is_draft_row),
            ):
                projection.register_buffer(name, buffer, persistent=False)
            projection.quant_method = _AdaptedLinearMethod(projection.quant_method, lora.scale)

    def load(self) -> None:
        """Copy this rank's part from the file."""
        from safetensors.torch import load_file

        tensors = load_file(self._lora.file)
        for layer, projection in self._projections.items():
            size = projection.input_size_per_partition
            down = tensors[TENSOR_NAME.format(layer=layer, half="A")]
            projection.draft_lora_a.copy_(down.narrow(1, projection.tp_rank * size, size))
            projection.draft_lora_b.copy_(tensors[TENSOR_NAME.format(layer=layer, half="B")])
