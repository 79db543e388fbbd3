"""LLaDA2 on vLLM's Bailing: the same layers and weight names; 2.2's experts are chosen by block."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.models.bailing_moe import BailingMoeV2ForCausalLM

from vllm_diffusion.families.llada2 import block_routing
from vllm_diffusion.runner.masked_model import MaskedModel


class LLaDA2MoeModelLM(MaskedModel, BailingMoeV2ForCausalLM):
    """LLaDA2.0, 2.1 and 2.2, mini and flash."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        block_routing.install()
        super().__init__(vllm_config=vllm_config, prefix=prefix)
