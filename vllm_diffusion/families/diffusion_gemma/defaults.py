"""Denoising settings of DiffusionGemma where a request brings none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm_diffusion.canvas.slots import DenoisingDefaults
from vllm_diffusion.decoding.settings import PRESETS, QUALITY, SERVER
from vllm_diffusion.settings.generation_config import generation_config
from vllm_diffusion.settings.plugin_settings import OPTION, plugin_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Keys of generation_config.json.
_GENERATION_KEYS = tuple(name for name in SERVER if name != "entropy_bound")
_SAMPLER_CLASS = "EntropyBoundSamplerConfig"


def diffusion_gemma_defaults(vllm_config: VllmConfig) -> DenoisingDefaults:
    """Denoising settings: start-up option, preset, ``--diffusion-config``, the checkpoint's file.

    Each comes before those after it.

    Raises:
        ValueError: Naming the missing or malformed key, its file, and how to set it.
    """
    settings = plugin_settings(vllm_config)
    generation, source = generation_config(vllm_config.model_config)
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
        if not SERVER[name].allows(value):
            raise ValueError(f"{source}: {name}={value!r} {SERVER[name].rule}.")
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
    setting = QUALITY["entropy_bound"]
    if not setting.allows(bound):
        raise ValueError(f"{source}: sampler_config.entropy_bound={bound!r} {setting.rule}.")
    return float(bound)
