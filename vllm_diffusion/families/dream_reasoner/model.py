"""DreamReasoner on vLLM's Qwen3: the same layers and weight names."""

from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from vllm_diffusion.runner.masked_model import MaskedModel


class DreamForCausalLM(MaskedModel, Qwen3ForCausalLM):
    """8B."""
