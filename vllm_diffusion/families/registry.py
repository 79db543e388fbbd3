"""The families that are served. A new one is a line here."""

from typing import NamedTuple


class Family(NamedTuple):
    """Family of block-diffusion models, by names: its registration imports none of its modules.

    Attributes:
        architecture: Name in ``architectures`` of its checkpoints' ``config.json``.
        model: ``"module:Class"``: layers and weight names; its ``get_model_state_cls`` names the
            state.
        engine_config: ``"module:Class"``, a :class:`BlockDiffusionEngineConfig`.
        config: ``"module:Class"``, a configuration of ``transformers`` for a ``model_type`` that
            neither it nor vLLM knows; ``None`` if one of them does.
        tokenizer: ``"module:Class"``, a tokenizer whose published class is code of the checkpoints'
            repositories; ``None`` if ``transformers`` has it.
        published_as: Name of the class in ``auto_map`` of files whose ``architectures`` name the
            ordinary model with these layers; ``None`` if there are none.
        text_model: Architecture of the text layers saved by themselves; ``None`` where they are
            the whole model.
        beside_adapter: Architecture that ``config.json`` has in place of this one, where a folder
            ``adapter`` lies next to it; ``None`` if there is none.
    """

    architecture: str
    model: str
    engine_config: str
    config: str | None = None
    tokenizer: str | None = None
    published_as: str | None = None
    text_model: str | None = None
    beside_adapter: str | None = None


def _family(
    architecture: str,
    folder: str,
    engine_config: str,
    config: str | None = None,
    model: str | None = None,
    tokenizer: str | None = None,
    **others: str,
) -> Family:
    """Make a row from a folder here, the names in its ``startup.py`` and ``tokenizer.py``, and its
    model's where it differs.
    """
    at = f"vllm_diffusion.families.{folder}."
    return Family(
        architecture,
        f"{at}model:{model or architecture}",
        f"{at}startup:{engine_config}",
        config and f"{at}startup:{config}",
        tokenizer and f"{at}tokenizer:{tokenizer}",
        **others,
    )


FAMILIES = (
    _family(
        "DiffusionGemmaForBlockDiffusion",
        "diffusion_gemma",
        "DiffusionGemmaEngineConfig",
        text_model="DiffusionGemmaForCausalLM",
    ),
    _family("SDARForCausalLM", "sdar", "SDAREngineConfig", "SDARConfig"),
    _family("UnoQwen3ForCausalLM", "uno", "UnoEngineConfig", beside_adapter="SDARForCausalLM"),
    # A name that an operator gives, since config.json has that of the autoregressive model.
    _family("UnoK2HorizonForCausalLM", "uno", "UnoK2HorizonEngineConfig"),
    _family("SDARMoeForCausalLM", "sdar", "SDARMoeEngineConfig", "SDARMoeConfig"),
    _family("LLaDA2MoeModelLM", "llada2", "LLaDA2EngineConfig", "LLaDA2MoeConfig"),
    _family(
        "NemotronLabsDiffusionModel",
        "nemotron",
        "NemotronLabsDiffusionEngineConfig",
        "NemotronLabsDiffusionConfig",
    ),
    _family(
        "Fast_dLLM_QwenForCausalLM",
        "fast_dllm",
        "FastDLLMEngineConfig",
        "FastDLLMConfig",
        "FastDLLMForCausalLM",
    ),
    # A name that an operator gives, since config.json has that of the autoregressive model.
    _family(
        "Fast_dLLM_Qwen3ForCausalLM",
        "fast_dllm",
        "FastDLLMQwen3EngineConfig",
        model="FastDLLMQwen3ForCausalLM",
    ),
    _family(
        "StableDiffcoderForCausalLM",
        "stable_diffcoder",
        "StableDiffcoderEngineConfig",
        published_as="SeedDiffcoderForCausalLM",
    ),
    _family("DreamForCausalLM", "dream_reasoner", "DreamReasonerEngineConfig", "DreamConfig"),
    _family("A2DQwen3LMHeadModel", "a2d", "A2DEngineConfig", "A2DQwen3Config"),
    _family("A2DQwen2LMHeadModel", "a2d", "A2DQwen2EngineConfig", "A2DQwen2Config"),
    _family("A2DLlamaLMHeadModel", "a2d", "A2DLlamaEngineConfig", "A2DLlamaConfig"),
    # Names that an operator gives, since config.json has that of BD3LM.
    _family("A2DQwen3MDLM", "a2d", "MDLMEngineConfig", "A2DQwen3Config", "A2DQwen3LMHeadModel"),
    _family(
        "A2DQwen2MDLM", "a2d", "MDLMQwen2EngineConfig", "A2DQwen2Config", "A2DQwen2LMHeadModel"
    ),
    _family(
        "A2DLlamaMDLM", "a2d", "MDLMLlamaEngineConfig", "A2DLlamaConfig", "A2DLlamaLMHeadModel"
    ),
    _family(
        "MinerUDiffusionForConditionalGeneration",
        "mineru",
        "MinerUEngineConfig",
        "MinerUDiffusionConfig",
    ),
    # Its ``model_type`` is that of ``DreamForCausalLM``, whose configuration class reads both.
    _family("DreamModel", "dream", "DreamEngineConfig", tokenizer="DreamTokenizer"),
    _family("CoDALanguageModel", "coda", "CoDAEngineConfig", "CoDAConfig"),
    _family("RND1LM", "rnd1", "RND1EngineConfig", "RND1Config"),
    _family("LLaDAModelLM", "llada", "LLaDAEngineConfig", "LLaDAConfig"),
    _family("LLaDAMoEModelLM", "llada", "LLaDAMoEEngineConfig", "LLaDAMoEConfig"),
    _family("ILLaDAForCausalLM", "illada", "ILLaDAEngineConfig", "ILLaDAConfig"),
)
