"""What the models of masked families have in common."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig

from vllm_diffusion.adapters import worker
from vllm_diffusion.adapters.worker import Adaptable
from vllm_diffusion.model_state.base import BlockDiffusionModelState


class MaskedModel(Adaptable):
    """In front of the class of vLLM that has the layers."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        worker.install()
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]

    @staticmethod
    def get_model_state_cls() -> type[BlockDiffusionModelState]:
        """The state whose canvases are tokens."""
        return BlockDiffusionModelState
