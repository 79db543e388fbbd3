"""LLaDA on vLLM's Llama, whose layers it has under other names, and LLaDA-MoE on Qwen3-MoE."""

import re

from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from vllm_diffusion.families.llada.startup import IN_LAYERS, MODULES
from vllm_diffusion.runner.masked_model import MaskedModel

# The head has the name of an MLP's last layer, but no layer before it.
_NAMES = WeightsMapper(
    orig_to_new_regex={
        **{re.compile(rf"^{re.escape(name)}\b"): own for own, name in MODULES.items()},
        **{
            re.compile(rf"^(model\.layers\.\d+)\.{name}\b"): rf"\1.{own}"
            for own, name in IN_LAYERS.items()
        },
    }
)


class LLaDAModelLM(MaskedModel, LlamaForCausalLM):
    """LLaDA-8B, LLaDA-1.5."""

    published_names = _NAMES
    # Read for names in ignore lists of quantised checkpoints too.
    hf_to_vllm_mapper = _NAMES | LlamaForCausalLM.hf_to_vllm_mapper


class LLaDAMoEModelLM(MaskedModel, Qwen3MoeForCausalLM):
    """LLaDA-MoE-7B-A1B."""
