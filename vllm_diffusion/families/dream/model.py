"""Dream on vLLM's Qwen2: the same layers and weight names."""

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

from vllm_diffusion.runner.masked_model import MaskedModel


class DreamModel(MaskedModel, Qwen2ForCausalLM):
    """Dream-v0-7B, Dream-Coder-v0-7B and DiffuCoder-7B."""
