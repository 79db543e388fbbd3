"""What the operator sets with ``--additional-config``, validated once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, get_args

from vllm_diffusion.decoding.settings import PRESETS, SERVER

if TYPE_CHECKING:
    from vllm.config import VllmConfig


OPTION = "--additional-config '{\"diffusion\": {...}}'"


@dataclass(frozen=True)
class PluginSettings:
    """What the operator sets with ``--additional-config '{"diffusion": {...}}'``.

    ``None`` leaves a setting to the checkpoint's ``generation_config.json``.

    Attributes:
        max_denoising_steps: N, the step cap of every canvas, 1 to 10,000.
        t_min: Temperature after the last step, 1e-4 to 1e4.
        t_max: Temperature at the first step, at least ``t_min``.
        entropy_bound: Nats, above 0.
        confidence_threshold: Mean entropy in nats, above 0.
        stability_threshold: Steps, at least 0.
        window_anchor: ``"canvas"`` ties the sliding window of a canvas row to its canvas, as the
            reference implementation does; ``"query"`` to the row, as stock vLLM does.
        attention: Which implementation of :func:`attention_kernels.canvas_attention` runs:
            ``"auto"``, ``"reference"``, ``"triton"`` or ``"cute"``.
        preset: ``"fast"``, ``"balanced"`` or ``"quality"``: entropy bound and thresholds that go
            together, where they are not set by themselves.
        converge_at_end: Judge a canvas by its positions up to its first end token only, since what
            follows is thrown away.
        fused_encode: Encode a finished canvas in the same pass as the next canvas's first step;
            ``None`` where it can be.
        keep_last_canvas: Encode the last canvas of a request behind its answer, and keep in the
            prefix cache what the next turn of a chat needs of it.
    """

    max_denoising_steps: int | None = None
    t_min: float | None = None
    t_max: float | None = None
    entropy_bound: float | None = None
    confidence_threshold: float | None = None
    stability_threshold: int | None = None
    window_anchor: str = "canvas"
    attention: str = "auto"
    preset: str | None = None
    converge_at_end: bool = False
    fused_encode: bool | None = None
    keep_last_canvas: bool = False

    def __post_init__(self) -> None:
        from attention_kernels.canvas_attention import Impl, WindowAnchor

        for name, setting in SERVER.items():
            value = getattr(self, name)
            if value is not None and not setting.allows(value):
                raise ValueError(f"{name}={value!r} {setting.rule}.")
        choices = {
            "window_anchor": get_args(WindowAnchor),
            "attention": get_args(Impl),
            "preset": (None, *PRESETS),
        }
        for name, known in choices.items():
            value = getattr(self, name)
            if value not in known:
                names = " or ".join(f'"{choice}"' for choice in known if choice is not None)
                raise ValueError(f"{name}={value!r} is not known; set it to {names}.")
        for name in ("converge_at_end", "fused_encode", "keep_last_canvas"):
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "fused_encode"):
                raise ValueError(f"{name}={value!r} must be true or false.")


def plugin_settings(vllm_config: VllmConfig) -> PluginSettings:
    """Parse and validate ``additional_config["diffusion"]``.

    Raises:
        ValueError: Naming the setting, what it got and what is allowed.
    """
    additional = vllm_config.additional_config
    section = additional.get("diffusion", {}) if isinstance(additional, Mapping) else {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{OPTION}: diffusion must be a mapping; got {section!r}.")
    known = [field.name for field in fields(PluginSettings)]
    for name in section:
        if name not in known:
            raise ValueError(f"{OPTION}: {name} is not known; known are {', '.join(known)}.")
    try:
        return PluginSettings(**section)
    except ValueError as error:
        raise ValueError(f"{OPTION}: {error}") from None


def fuses_encode(vllm_config: VllmConfig) -> bool:
    """Whether a finished canvas and the next one share a pass.

    Raises:
        ValueError: If the operator asks for it where it cannot be, with the reason.
    """
    chosen = plugin_settings(vllm_config).fused_encode
    backend = vllm_config.attention_config.backend
    if chosen is not False and backend is not None and backend.name != "CUSTOM":
        # Known causal rows and a canvas in one sequence need more than a flag.
        reason = f"--attention-backend {backend.name} knows one causal flag for a whole sequence"
    elif vllm_config.scheduler_config.async_scheduling:
        reason = "--async-scheduling does not know in time which step converges"
    else:
        return chosen is not False
    if chosen:
        raise ValueError(f"{OPTION}: fused_encode cannot be true: {reason}; leave one of them out.")
    return False
