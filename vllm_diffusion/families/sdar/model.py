"""SDAR on vLLM's Qwen3: the same layers and weight names."""

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_diffusion.runner.masked_model import MaskedModel


class SDARForCausalLM(MaskedModel, Qwen3ForCausalLM):
    """1.7B, 4B and 8B, and TraDo."""


class SDARMoeForCausalLM(MaskedModel, Qwen3MoeForCausalLM):
    """30B-A3B."""
