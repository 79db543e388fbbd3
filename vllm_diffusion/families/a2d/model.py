"""A2D on vLLM's Qwen3: the same layers and weight names."""

from __future__ import annotations

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from vllm_diffusion.runner.masked_model import MaskedModel


class A2DQwen3LMHeadModel(MaskedModel, Qwen3ForCausalLM):
    """Qwen3-0.6B-diffusion-bd3lm."""
