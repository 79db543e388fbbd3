"""Nemotron-Labs-Diffusion on vLLM's Mistral, whose layers it has under other names; the LoRA of
drafts.

Passes hold rows of drafts next to rows that are verified, and rows of prompts, so the LoRA is added
row by row: to rows of drafts alone, and to the bit nothing else changes. With tensor parallelism a
rank adds what its part of the input gives, before the ranks are summed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearMethodBase
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.gpu.states import RequestState

from vllm_diffusion.canvas.slots import Phase
from vllm_diffusion.decoding.ways import holding
from vllm_diffusion.families.nemotron.draft_lora import TENSOR_NAME, DraftLora, find_draft_lora
from vllm_diffusion.runner.model_state import BlockDiffusionModelState
from vllm_diffusion.startup.plan import spec_of
from vllm_diffusion.weights.adapters import checking_manager
from vllm_diffusion.weights.adapters.checking_manager import Adaptable
from vllm_diffusion.weights.loading import checked_loading


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
        """Adapt each layer; the added product is zero until :meth:`load`.

        Args:
            lora: Adapter to add.
            layers: Layers of the model.
            max_num_tokens: Largest number of tokens of a pass.
        """
        self._lora = lora
        self._projections = [layer.self_attn.o_proj for layer in layers]
        self.is_draft_row = torch.zeros(max_num_tokens, dtype=torch.bool)
        for projection in self._projections:
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
        for layer, projection in enumerate(self._projections):
            size = projection.input_size_per_partition
            down = tensors[TENSOR_NAME.format(layer=layer, half="A")]
            projection.draft_lora_a.copy_(down.narrow(1, projection.tp_rank * size, size))
            projection.draft_lora_b.copy_(tensors[TENSOR_NAME.format(layer=layer, half="B")])


class NemotronModelState(BlockDiffusionModelState):
    """Canvases are tokens; rows of a draft are marked where there is a LoRA for them."""

    def prepare_inputs(self, input_batch: InputBatch, req_states: RequestState) -> dict[str, Any]:
        inputs = super().prepare_inputs(input_batch, req_states)
        adapter = self.model.draft_adapter
        if adapter is not None:
            is_draft = adapter.is_draft_row.zero_()
            if input_batch.num_draft_tokens > 0:
                slot = input_batch.expanded_idx_mapping.long()
                drafted = self.slots.phase == int(Phase.DENOISING)
                verifies = self.slots.way.fact(lambda way: way.layout.verifies)
                drafted = holding(verifies, drafted)
                is_draft[input_batch.logits_indices] = drafted[slot]
        return inputs


_NAMES = WeightsMapper(orig_to_new_prefix={"encoder.": "model.", "diffusion_head.": "lm_head."})


class NemotronLabsDiffusionModel(Adaptable, MistralForCausalLM):
    """3B, 8B and 14B.

    Attributes:
        draft_adapter: The LoRA of rows of drafts; ``None`` without one.
    """

    # Read for names in ignore lists of quantised checkpoints too.
    hf_to_vllm_mapper = _NAMES | MistralForCausalLM.hf_to_vllm_mapper

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        """Make vLLM's model with queries scaled by their position."""
        checking_manager.install()
        config = vllm_config.model_config.hf_config
        rope = config.rope_parameters
        # vLLM's Mistral reads these here; the published file has them in its rope_parameters.
        config.llama_4_scaling = {
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": rope["llama_4_scaling_beta"],
        }
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        self._is_diffusion = vllm_config.model_config.is_diffusion
        self.draft_adapter: DraftAdapter | None = None
        spec = spec_of(vllm_config.model_config)
        drafts = spec is not None and any(way.layout.verifies for way in spec.ways)
        lora = find_draft_lora(vllm_config.model_config) if drafts else None
        if lora is not None:
            max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            self.draft_adapter = DraftAdapter(lora, self.model.layers, max_num_tokens)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """From the published names; the adapter's file is read once, and may be gone at an
        update.
        """
        is_first = not hasattr(self, "_was_loaded")
        with checked_loading(self, weights) as checked:
            loaded: set[str] = super().load_weights(_NAMES.apply(checked))
        if self.draft_adapter is not None and is_first:
            self.draft_adapter.load()
        return loaded

    def get_model_state_cls(self) -> type[ModelState]:
        """The state whose canvases are tokens; vLLM's own in the autoregressive mode."""
        return NemotronModelState if self._is_diffusion else DefaultModelState
