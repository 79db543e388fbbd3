"""Stable-DiffCoder on vLLM's Llama: the same layers and weight names."""

from __future__ import annotations

from vllm.model_executor.models.llama import LlamaForCausalLM

from vllm_diffusion.model_state.base import BlockDiffusionModelState


class StableDiffcoderForCausalLM(LlamaForCausalLM):
    """8B."""

    @staticmethod
    def get_model_state_cls() -> type[BlockDiffusionModelState]:
        """The state whose canvases are tokens."""
        return BlockDiffusionModelState
