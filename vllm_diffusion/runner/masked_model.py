"""Mixin of the models of masked families."""

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import WeightsMapper
from vllm.v1.worker.gpu.model_states.interface import ModelState

from vllm_diffusion.runner.model_state import BlockDiffusionModelState
from vllm_diffusion.weights.adapters import checking_manager
from vllm_diffusion.weights.adapters.checking_manager import Adaptable
from vllm_diffusion.weights.loading import checked_loading


class MaskedModel(Adaptable):
    """Mixin that precedes the class of vLLM that has the layers.

    Attributes:
        published_names: Names of the checkpoint's tensors, to those of vLLM's class.
    """

    published_names: ClassVar[WeightsMapper] = WeightsMapper()

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **kwargs: Any) -> None:
        checking_manager.install()
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load them as vLLM's class does."""
        with checked_loading(self, weights) as checked:  # type: ignore[arg-type]
            return super().load_weights(self.published_names.apply(checked))  # type: ignore[misc]

    def get_model_state_cls(self) -> type[ModelState]:
        """The state whose canvases are tokens."""
        return BlockDiffusionModelState
