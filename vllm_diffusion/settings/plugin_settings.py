"""Start-up settings, validated once. The only reader of this package's environment variables."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vllm_diffusion.decoding.settings import MAX_STEPS, QUALITY
from vllm_diffusion.requests.params import PRESETS

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from vllm_diffusion.canvas.slots import DenoisingDefaults

OPTION = "--additional-config '{\"diffusion\": {...}}'"


@dataclass(frozen=True)
class EnvironmentFlags:
    """The package's environment variables.

    Attributes:
        disabled: ``VLLM_DIFFUSION_DISABLE=1``: both entry points do nothing; stock vLLM serves.
        force_cpu: ``VLLM_DIFFUSION_CPU=1``: use the CPU even where there is a GPU.
    """

    disabled: bool
    force_cpu: bool


def environment_flags() -> EnvironmentFlags:
    """Read the environment now; child processes inherit it, so every process sees the same."""
    return EnvironmentFlags(
        disabled=os.environ.get("VLLM_DIFFUSION_DISABLE", "") == "1",
        force_cpu=os.environ.get("VLLM_DIFFUSION_CPU", "") == "1",
    )


_NUMBERS = {"max_denoising_steps": MAX_STEPS, **QUALITY}


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

        for name, setting in _NUMBERS.items():
            value = getattr(self, name)
            if value is not None and (problem := setting.problem(value)):
                raise ValueError(f"{name} {problem}")
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


# Keys of generation_config.json.
_GENERATION_KEYS = tuple(name for name in _NUMBERS if name != "entropy_bound")
_SAMPLER_CLASS = "EntropyBoundSamplerConfig"


def diffusion_gemma_defaults(vllm_config: VllmConfig) -> DenoisingDefaults:
    """Denoising settings: start-up option, preset, ``--diffusion-config``, the checkpoint's file.

    Each comes before those after it.

    Raises:
        ValueError: Naming the missing or malformed key, its file, and how to set it.
    """
    from vllm_diffusion.canvas.slots import DenoisingDefaults

    settings = plugin_settings(vllm_config)
    generation, source = _generation_config(vllm_config.model_config)
    preset = PRESETS[settings.preset] if settings.preset is not None else {}
    values: dict[str, Any] = {}
    for name in _GENERATION_KEYS:
        value = getattr(settings, name)
        if value is None:
            value = preset.get(name)
        if value is None and name == "max_denoising_steps" and vllm_config.diffusion_config:
            value = vllm_config.diffusion_config.max_denoising_steps
        if value is None:
            value = generation.get(name)
        if value is None:
            raise ValueError(
                f"{source} has no {name}, which DiffusionGemma's denoising needs. Add it there, "
                f'or set it with --additional-config \'{{"diffusion": {{"{name}": ...}}}}\'.'
            )
        if problem := _NUMBERS[name].problem(value):
            raise ValueError(f"{source}: {name} {problem}")
        values[name] = value
    if values["t_max"] < values["t_min"]:
        raise ValueError(
            f"t_max={values['t_max']} is below t_min={values['t_min']}; the temperature falls from "
            "t_max to t_min."
        )
    bound = settings.entropy_bound
    if bound is None:
        bound = preset.get("entropy_bound")
    values["entropy_bound"] = _entropy_bound(bound, generation, source)
    return DenoisingDefaults(**values)


def _entropy_bound(chosen: float | None, generation: Mapping[str, Any], source: str) -> float:
    sampler = generation.get("sampler_config")
    if not isinstance(sampler, Mapping):
        sampler = {}
    name = sampler.get("_cls_name", _SAMPLER_CLASS)
    if name != _SAMPLER_CLASS:
        raise ValueError(
            f"{source}: sampler_config is a {name}; only {_SAMPLER_CLASS} is implemented."
        )
    if chosen is not None:
        return chosen
    bound = sampler.get("entropy_bound")
    if bound is None:
        raise ValueError(
            f"{source} has no sampler_config.entropy_bound. Add it there, or set entropy_bound "
            f"with {OPTION}."
        )
    if problem := QUALITY["entropy_bound"].problem(bound):
        raise ValueError(f"{source}: sampler_config.entropy_bound {problem}")
    return float(bound)


def _generation_config(model_config: ModelConfig) -> tuple[Mapping[str, Any], str]:
    """The checkpoint's generation settings, and a name for where they come from."""
    folder = model_config.generation_config
    if folder in ("auto", "vllm"):
        folder = model_config.hf_config_path or model_config.model
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{path} is not valid JSON ({error}); mend it, or copy the checkpoint again."
            ) from None
        if not isinstance(content, dict):
            raise ValueError(
                f"{path} must hold a JSON object of generation settings; copy the checkpoint again."
            )
        return content, str(path)
    # A checkpoint on the hub: vLLM knows how to find it.
    return model_config.try_get_generation_config(), f"generation_config.json of {folder}"


def compile_backend(vllm_config: VllmConfig) -> str | None:
    """Backend of ``torch.compile`` for the decision step, ``None`` to run it eagerly.

    Eager where the operator asked for it, and on a CPU without a C++ compiler.
    """
    from vllm.platforms import current_platform

    if vllm_config.model_config.enforce_eager:
        return None
    if current_platform.is_cpu():
        return "inductor" if has_cpp_compiler() else None
    return str(current_platform.simple_compile_backend)


def has_cpp_compiler() -> bool:
    """Whether ``torch.compile`` can build CPU code here: it needs a C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    return shutil.which(compiler) is not None or shutil.which("clang++") is not None
