"""Random weights whose routers wake as few experts for a canvas as trained ones do.

    --worker-extension-cls awake_experts.WorkerExtension --hf-overrides.awake_experts 84

vLLM's dummy weights wake all of them, so that a pass reads more than one of a trained checkpoint.
With these options of ``vllm serve``, ours and stock's, all experts of a router but
``awake_experts`` have no weights: their scores are zero, and those that are chosen are above it.
The folder of this file has to be on ``PYTHONPATH``: a worker imports it before it loads a model.
"""

from typing import Any

from torch import nn
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader


class WorkerExtension:
    """Empty: that a worker imports its file is what it is named for."""


@register_model_loader("dummy")
class Loader(DummyModelLoader):
    """Dummy weights, with routers that wake as many experts as the option asks for."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        super().load_weights(model, model_config)
        awake = getattr(model_config.hf_config, "awake_experts", None)
        for name, weight in model.named_parameters():
            if awake is not None and ".router.proj." in name:
                weight.data[awake:] = 0
