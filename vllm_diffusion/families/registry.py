"""The families that are served, and those that cannot be. A new one is a line here."""

from __future__ import annotations

from typing import NamedTuple

_FAMILIES = "vllm_diffusion.families."


class Family(NamedTuple):
    """Family of block-diffusion models, by names: its registration imports none of its modules.

    Attributes:
        architecture: Name in ``architectures`` of its checkpoints' ``config.json``.
        model: ``"module:Class"``: layers and weight names; its ``get_model_state_cls`` names the
            state.
        engine_config: ``"module:Class"``, a :class:`BlockDiffusionEngineConfig`.
        config: ``"module:Class"``, a configuration of ``transformers`` for a ``model_type`` that
            neither it nor vLLM knows; ``None`` if one of them does.
    """

    architecture: str
    model: str
    engine_config: str
    config: str | None = None


FAMILIES = (
    Family(
        "DiffusionGemmaForBlockDiffusion",
        _FAMILIES + "diffusion_gemma.model:DiffusionGemmaForBlockDiffusion",
        _FAMILIES + "diffusion_gemma.startup:DiffusionGemmaEngineConfig",
    ),
    Family(
        "SDARForCausalLM",
        _FAMILIES + "sdar.model:SDARForCausalLM",
        _FAMILIES + "sdar.startup:SDAREngineConfig",
        _FAMILIES + "sdar.startup:SDARConfig",
    ),
    Family(
        "SDARMoeForCausalLM",
        _FAMILIES + "sdar.model:SDARMoeForCausalLM",
        _FAMILIES + "sdar.startup:SDARMoeEngineConfig",
        _FAMILIES + "sdar.startup:SDARMoeConfig",
    ),
    Family(
        "LLaDA2MoeModelLM",
        _FAMILIES + "llada2.model:LLaDA2MoeModelLM",
        _FAMILIES + "llada2.startup:LLaDA2EngineConfig",
        _FAMILIES + "llada2.startup:LLaDA2MoeConfig",
    ),
    Family(
        "NemotronLabsDiffusionModel",
        _FAMILIES + "nemotron.model:NemotronLabsDiffusionModel",
        _FAMILIES + "nemotron.startup:NemotronLabsDiffusionEngineConfig",
        _FAMILIES + "nemotron.startup:NemotronLabsDiffusionConfig",
    ),
    Family(
        "Fast_dLLM_QwenForCausalLM",
        _FAMILIES + "fast_dllm.model:FastDLLMForCausalLM",
        _FAMILIES + "fast_dllm.startup:FastDLLMEngineConfig",
        _FAMILIES + "fast_dllm.startup:FastDLLMConfig",
    ),
    Family(
        "StableDiffcoderForCausalLM",
        _FAMILIES + "stable_diffcoder.model:StableDiffcoderForCausalLM",
        _FAMILIES + "stable_diffcoder.startup:StableDiffcoderEngineConfig",
    ),
)

# Any class does as their model: the configuration is refused before it is made.
_NO_MODEL = "vllm.model_executor.models.llama:LlamaForCausalLM"

REFUSED = (
    Family(
        "DreamModel",
        _NO_MODEL,
        _FAMILIES + "refused:DreamEngineConfig",
        _FAMILIES + "refused:DreamConfig",
    ),
    Family(
        "DreamForCausalLM",
        _NO_MODEL,
        _FAMILIES + "refused:DreamEngineConfig",
        _FAMILIES + "refused:DreamConfig",
    ),
    Family(
        "LLaDAModelLM",
        _NO_MODEL,
        _FAMILIES + "refused:LLaDAEngineConfig",
        _FAMILIES + "refused:LLaDAConfig",
    ),
)
