"""Nemotron-Labs-Diffusion on vLLM's Mistral, whose layers it has under other names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.interface import ModelState

from vllm_diffusion.model_state.base import BlockDiffusionModelState

_NAMES = WeightsMapper(orig_to_new_prefix={"encoder.": "model.", "diffusion_head.": "lm_head."})


class NemotronLabsDiffusionModel(MistralForCausalLM):
    """3B, 8B and 14B."""

    # Read for names in ignore lists of quantised checkpoints too.
    hf_to_vllm_mapper = _NAMES | MistralForCausalLM.hf_to_vllm_mapper

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        """As vLLM's, with queries scaled by their position."""
        config = vllm_config.model_config.hf_config
        rope = config.rope_parameters
        # Where vLLM's Mistral looks for what the published file keeps with the rotary embedding.
        config.llama_4_scaling = {
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": rope["llama_4_scaling_beta"],
        }
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
        self._is_diffusion = vllm_config.model_config.is_diffusion

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """From the published names."""
        loaded: set[str] = super().load_weights(_NAMES.apply(weights))
        return loaded

    def get_model_state_cls(self) -> type[ModelState]:
        """The state whose canvases are tokens; vLLM's own in the autoregressive mode."""
        return BlockDiffusionModelState if self._is_diffusion else DefaultModelState
