"""Nemotron-Labs-Diffusion on vLLM's Mistral, whose layers it has under other names."""

from typing import Any

from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.utils import WeightsMapper

from vllm_diffusion.families.nemotron.startup import find_draft_lora
from vllm_diffusion.runner.adapted_drafts import AdaptedDraftModel

_NAMES = WeightsMapper(orig_to_new_prefix={"encoder.": "model.", "diffusion_head.": "lm_head."})


class NemotronLabsDiffusionModel(AdaptedDraftModel, MistralForCausalLM):
    """3B, 8B and 14B."""

    published_names = _NAMES
    # Read for names in ignore lists of quantised checkpoints too.
    hf_to_vllm_mapper = _NAMES | MistralForCausalLM.hf_to_vllm_mapper
    find_draft_lora = staticmethod(find_draft_lora)

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        """Make vLLM's model with queries scaled by their position."""
        config = vllm_config.model_config.hf_config
        rope = config.rope_parameters
        # vLLM's Mistral reads these here; the published file has them in its rope_parameters.
        config.llama_4_scaling = {
            "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": rope["llama_4_scaling_beta"],
        }
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)
