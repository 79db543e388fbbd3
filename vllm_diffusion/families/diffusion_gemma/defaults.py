"""Denoising settings that a checkpoint of DiffusionGemma is published with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_diffusion.startup.denoising_settings import Published, generation_config

if TYPE_CHECKING:
    from vllm.config import ModelConfig

_SAMPLER_CLASS = "EntropyBoundSamplerConfig"


def published_settings(model_config: ModelConfig) -> Published:
    """Read the settings in the checkpoint's ``generation_config.json``.

    Raises:
        ValueError: If it names another sampler.
    """
    generation, source = generation_config(model_config)
    sampler = generation.get("sampler_config")
    if not isinstance(sampler, Mapping):
        sampler = {}
    name = sampler.get("_cls_name", _SAMPLER_CLASS)
    if name != _SAMPLER_CLASS:
        raise ValueError(
            f"{source}: sampler_config is a {name}; only {_SAMPLER_CLASS} is implemented."
        )
    values = {**generation, "entropy_bound": sampler.get("entropy_bound")}
    return Published(values, source, keys={"entropy_bound": "sampler_config.entropy_bound"})
