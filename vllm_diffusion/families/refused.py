"""Models that are not served, whose checkpoints are refused by name.

Most attend in both directions over the whole sequence, so that no key or value is final before the
last token is, and no cache of them is exact. The configuration of ``DreamModel`` is that of DreamReasoner-8B,
which has the same ``model_type`` and is served (``dream_reasoner/startup.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from transformers import PretrainedConfig

from vllm_diffusion.startup.engine_config import BlockDiffusionEngineConfig

if TYPE_CHECKING:
    from vllm.config import ModelConfig


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
    """The entry of ``DreamModel``, and of a ``DreamForCausalLM`` without blocks."""

    model = "Dream (and DiffuCoder)"


class LLaDAEngineConfig(RefusedEngineConfig):
    """The entry of ``LLaDAModelLM``."""

    model = "LLaDA-8B"
