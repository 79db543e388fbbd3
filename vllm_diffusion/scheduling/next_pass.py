"""Pass that the scheduler composes, and which rows of a request may share one."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.config import VllmConfig

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.startup.plugin_settings import fuses_encode, fuses_prompt


@dataclass(frozen=True)
class PassOrder:
    """Choice of the rows of a request that share a pass.

    Attributes:
        fuses_encode: True if a finished canvas is encoded in the pass of the next one's first step.
        fuses_prompt: True if the end of a prompt is encoded in the pass of the first canvas's first
            step; it is known in time in both orders.
        commits_in_place: True if the pass that emits a canvas also computes its final keys and
            values.
        emits_by_encoding: True if that pass runs the canvas's rows as known tokens.
    """

    fuses_encode: bool
    fuses_prompt: bool
    commits_in_place: bool
    emits_by_encoding: bool

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> PassOrder:
        """Read the order that start-up chose."""
        spec: CanvasSpec = vllm_config.model_config.canvas_spec
        is_async: bool = vllm_config.scheduler_config.async_scheduling
        return cls(
            fuses_encode=fuses_encode(vllm_config),
            fuses_prompt=fuses_prompt(vllm_config),
            commits_in_place=spec.commits_in_place(is_async),
            emits_by_encoding=spec.emits_by_encoding(is_async),
        )


@dataclass
class NextPass:
    """Pass that is being scheduled.

    Attributes:
        num_rows_left: Number of rows that the pass has left.
        canvases: Number of canvas rows beyond those that the stock scheduler granted, by request.
    """

    num_rows_left: int = 0
    canvases: dict[str, int] = field(default_factory=dict)
