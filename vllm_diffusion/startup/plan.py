"""What a start decides about a diffusion model, on which the API process, the engine and its
workers agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.ways import PassOrder, Way
from vllm_diffusion.startup.plugin_settings import PluginSettings, plugin_settings

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_diffusion.weights.adapters.support import AdapterSupport


@dataclass(frozen=True)
class DiffusionPlan:
    """Decisions of a start that vLLM's configuration has no fields for.

    ``ModelConfig.diffusion`` carries it to every process. A start makes it
    (:meth:`~vllm_diffusion.startup.engine_config.BlockDiffusionEngineConfig.verify_and_update_config`).

    Attributes:
        settings: The operator's.
        sets_max_num_seqs: The operator set ``--max-num-seqs``; otherwise vLLM has put a default.
        sets_max_num_batched_tokens: Likewise ``--max-num-batched-tokens``.
        spec: Description of canvases; ``None`` for a model that is served without them.
        own_attention: This package's back end attends, and not one of vLLM's.
        adapters: Rules for adapters; ``None`` without ``--enable-lora``.
        refusal_path: File where a process of the engine leaves why it refuses to start.
    """

    settings: PluginSettings = PluginSettings()
    sets_max_num_seqs: bool = True
    sets_max_num_batched_tokens: bool = True
    spec: CanvasSpec | None = None
    own_attention: bool = True
    adapters: AdapterSupport | None = None
    refusal_path: Path | None = None

    def order(self, is_async: bool | None, way: Way | None = None) -> PassOrder:
        """Return what the passes of a canvas do.

        Args:
            is_async: vLLM's ``async_scheduling``, which it may decide after the plan is made.
            way: The way of its request; ``None`` for the family's own.
        """
        assert self.spec is not None
        way = way or self.spec.ways[0]
        return PassOrder.of(way, is_async=bool(is_async), own_attention=self.own_attention)


def plan_of(vllm_config: VllmConfig) -> DiffusionPlan:
    """Return the plan of a model; for one that is not ours, the operator's settings and no
    canvases.

    Raises:
        ValueError: If a setting of such a model is malformed.
    """
    plan: DiffusionPlan | None = getattr(vllm_config.model_config, "diffusion", None)
    if plan is not None:
        return plan
    return DiffusionPlan(plugin_settings(vllm_config.additional_config))


def spec_of(model_config: ModelConfig) -> CanvasSpec | None:
    """Return the description of a model's canvases; ``None`` if it is served without them."""
    plan: DiffusionPlan | None = getattr(model_config, "diffusion", None)
    return None if plan is None else plan.spec
