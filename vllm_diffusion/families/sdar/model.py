"""SDAR on vLLM's Qwen3: the same layers and weight names."""

from __future__ import annotations

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_diffusion.model_state.base import BlockDiffusionModelState


class SDARForCausalLM(Qwen3ForCausalLM):
    """1.7B, 4B and 8B, and TraDo."""

    @staticmethod
    def get_model_state_cls() -> type[BlockDiffusionModelState]:
        """The state whose canvases are tokens."""
        return BlockDiffusionModelState


class SDARMoeForCausalLM(Qwen3MoeForCausalLM):
    """30B-A3B."""

    @staticmethod
    def get_model_state_cls() -> type[BlockDiffusionModelState]:
        """The state whose canvases are tokens."""
        return BlockDiffusionModelState
