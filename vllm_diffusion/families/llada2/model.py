"""LLaDA2 on vLLM's Bailing: the same layers and weight names."""

from __future__ import annotations

from vllm.model_executor.models.bailing_moe import BailingMoeV2ForCausalLM

from vllm_diffusion.model_state.base import BlockDiffusionModelState


class LLaDA2MoeModelLM(BailingMoeV2ForCausalLM):
    """LLaDA2.0 and 2.1, mini and flash."""

    @staticmethod
    def get_model_state_cls() -> type[BlockDiffusionModelState]:
        """The state whose canvases are tokens."""
        return BlockDiffusionModelState
