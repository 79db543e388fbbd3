"""Nemotron-Labs-Diffusion on vLLM's Mistral, whose layers it has under other names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState

from vllm_diffusion.families.nemotron.draft_adapter import DraftAdapter
from vllm_diffusion.families.nemotron.draft_lora import DraftLora
from vllm_diffusion.families.nemotron.state import NemotronModelState
from vllm_diffusion.runner.downcasts import counted_downcasts
from vllm_diffusion.weights.adapters import worker
from vllm_diffusion.weights.adapters.worker import Adaptable

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
        worker.install()
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
        lora: DraftLora | None = getattr(vllm_config.model_config, "draft_lora", None)
        if lora is not None:
            max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
            self.draft_adapter = DraftAdapter(lora, self.model.layers, max_num_tokens)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """From the published names."""
        with counted_downcasts():
            loaded: set[str] = super().load_weights(_NAMES.apply(weights))
        if self.draft_adapter is not None:
            self.draft_adapter.load()
        return loaded

    def get_model_state_cls(self) -> type[ModelState]:
        """The state whose canvases are tokens; vLLM's own in the autoregressive mode."""
        return NemotronModelState if self._is_diffusion else DefaultModelState
