"""The families that are served, and those that cannot be. A new one is a line here."""

from __future__ import annotations

from typing import NamedTuple

_ROOM = "vllm_diffusion.families."


class Family(NamedTuple):
    """A family of block-diffusion models, by names: nothing of it is imported to register it.

    Attributes:
        architecture: As ``architectures`` of its checkpoints' ``config.json`` says.
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


class RefusedFamily(NamedTuple):
    """A family whose checkpoints are refused by name.

    Attributes:
        architecture: As ``architectures`` of its checkpoints' ``config.json`` says.
        model_type: As ``model_type`` says.
        reason: Why, and what to do.
    """

    architecture: str
    model_type: str
    reason: str


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

_NO_EXACT_CACHE = (
    "attends in both directions over the whole sequence, so that no key or value is final before the "
    "last token is, and no cache of them is exact; serve a block-diffusion model (docs/families.md)."
)

REFUSED = (
    RefusedFamily("DreamModel", "Dream", f"Dream (and DiffuCoder) {_NO_EXACT_CACHE}"),
    RefusedFamily("LLaDAModelLM", "llada", f"LLaDA-8B {_NO_EXACT_CACHE}"),
)
