"""Fast-dLLM v2 on vLLM's Qwen2 and Qwen3: the same layers and weight names."""

from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from vllm_diffusion.runner.masked_model import MaskedModel


class FastDLLMForCausalLM(MaskedModel, Qwen2ForCausalLM):
    """1.5B and 7B."""


class FastDLLMQwen3ForCausalLM(MaskedModel, Qwen3ForCausalLM):
    """A Qwen3 that a trainer made a Fast-dLLM v2 of."""
