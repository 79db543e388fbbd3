"""iLLaDA on vLLM's Llama: the same layers and weight names."""

from vllm.model_executor.models.llama import LlamaForCausalLM

from vllm_diffusion.runner.masked_model import MaskedModel


class ILLaDAForCausalLM(MaskedModel, LlamaForCausalLM):
    """8B, with one matrix for embedding and head."""
