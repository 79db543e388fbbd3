"""Models that are not served, whose checkpoints are refused by name.

Most attend in both directions over the whole sequence, so that no key or value is final before the
last token is, and no cache of them is exact. DreamReasoner-8B has Dream's ``model_type`` and blocks; its
``architectures`` and ``block_size`` tell it (SJTU-DENG-Lab/Diffulex at 184ba97, its test of that model's configuration).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from transformers import PretrainedConfig

from vllm_diffusion.startup.engine_config import BlockDiffusionEngineConfig

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class DreamConfig(PretrainedConfig):
    """Configuration with the fields that are read before the refusal."""

    model_type = "Dream"


class LLaDAConfig(PretrainedConfig):
    """Configuration with the fields that are read before the refusal."""

    model_type = "llada"


class RefusedEngineConfig(BlockDiffusionEngineConfig):
    """The entry of an architecture that is not served."""

    # As its users call it.
    model: ClassVar[str]

    @classmethod
    def verify_and_update_model_config(cls, model_config: ModelConfig) -> None:
        raise ValueError(
            f"{cls.model} attends in both directions over the whole sequence, so that no key or value "
            "is final before the last token is, and no cache of them is exact; serve a "
            "block-diffusion model (docs/use/families.md)."
        )


class DreamEngineConfig(RefusedEngineConfig):
    """The entry of ``DreamModel`` and of ``DreamForCausalLM``."""

    model = "Dream (and DiffuCoder)"

    @classmethod
    def verify_and_update_model_config(cls, model_config: ModelConfig) -> None:
        block_size = getattr(model_config.hf_config, "block_size", None)
        if block_size is None:
            super().verify_and_update_model_config(model_config)
        raise ValueError(
            f"DreamReasoner-8B (model_type='Dream' with block_size={block_size!r}) denoises blocks with "
            "an exact cache, but its loop is not implemented; serve a family of docs/use/families.md "
            "(SDAR-8B-Chat has the same layers), or add it by docs/develop/add-a-family.md."
        )


class LLaDAEngineConfig(RefusedEngineConfig):
    """The entry of ``LLaDAModelLM``."""

    model = "LLaDA-8B"
