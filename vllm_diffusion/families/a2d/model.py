"""A2D on the bodies that its trainer converts: the same layers and weight names."""

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from vllm_diffusion.runner.masked_model import MaskedModel


class A2DQwen3LMHeadModel(MaskedModel, Qwen3ForCausalLM):
    """Qwen3-0.6B-diffusion-bd3lm and -mdlm."""


class A2DQwen2LMHeadModel(MaskedModel, Qwen2ForCausalLM):
    """Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm and -mdlm."""


class A2DLlamaLMHeadModel(MaskedModel, LlamaForCausalLM):
    """What the trainer makes of a Llama."""
