"""RND1 on vLLM's Qwen3-MoE: the same layers and weight names."""

from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from vllm_diffusion.runner.masked_model import MaskedModel


class RND1LM(MaskedModel, Qwen3MoeForCausalLM):
    """RND1-Base-0910, 30B-A3B."""
