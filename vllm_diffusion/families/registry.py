"""The families that are served, and those that cannot be. A new one is a line here."""

from __future__ import annotations

from typing import NamedTuple

_ROOM = "vllm_diffusion.families."


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
        _ROOM + "diffusion_gemma.model:DiffusionGemmaForBlockDiffusion",
        _ROOM + "diffusion_gemma.startup:DiffusionGemmaEngineConfig",
    ),
    Family(
        "SDARForCausalLM",
        _ROOM + "sdar.model:SDARForCausalLM",
        _ROOM + "sdar.startup:SDAREngineConfig",
        _ROOM + "sdar.startup:SDARConfig",
    ),
    Family(
        "SDARMoeForCausalLM",
        _ROOM + "sdar.model:SDARMoeForCausalLM",
        _ROOM + "sdar.startup:SDARMoeEngineConfig",
        _ROOM + "sdar.startup:SDARMoeConfig",
    ),
    Family(
        "LLaDA2MoeModelLM",
        _ROOM + "llada2.model:LLaDA2MoeModelLM",
        _ROOM + "llada2.startup:LLaDA2EngineConfig",
        _ROOM + "llada2.startup:LLaDA2MoeConfig",
    ),
    Family(
        "NemotronLabsDiffusionModel",
        _ROOM + "nemotron.model:NemotronLabsDiffusionModel",
        _ROOM + "nemotron.startup:NemotronLabsDiffusionEngineConfig",
        _ROOM + "nemotron.startup:NemotronLabsDiffusionConfig",
    ),
    Family(
        "Fast_dLLM_QwenForCausalLM",
        _ROOM + "fast_dllm.model:FastDLLMForCausalLM",
        _ROOM + "fast_dllm.startup:FastDLLMEngineConfig",
        _ROOM + "fast_dllm.startup:FastDLLMConfig",
    ),
    Family(
        "StableDiffcoderForCausalLM",
        _ROOM + "stable_diffcoder.model:StableDiffcoderForCausalLM",
        _ROOM + "stable_diffcoder.startup:StableDiffcoderEngineConfig",
    ),
)

# Any class does as their model: the configuration is refused before it is made.
_NO_MODEL = "vllm.model_executor.models.llama:LlamaForCausalLM"

REFUSED = (
    Family(
        "DreamModel",
        _NO_MODEL,
        _ROOM + "refused:DreamEngineConfig",
        _ROOM + "refused:DreamConfig",
    ),
    Family(
        "DreamForCausalLM",
        _NO_MODEL,
        _ROOM + "refused:DreamEngineConfig",
        _ROOM + "refused:DreamConfig",
    ),
    Family(
        "LLaDAModelLM",
        _NO_MODEL,
        _ROOM + "refused:LLaDAEngineConfig",
        _ROOM + "refused:LLaDAConfig",
    ),
)
