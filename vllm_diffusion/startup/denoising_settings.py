"""Default settings of a decoding rule, for requests that set none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_diffusion.decoding.rule import MAX_STEPS, Choice, DecodingRule, Setting
from vllm_diffusion.startup.plugin_settings import OPTION, SETTINGS, plugin_settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Published:
    """Settings that are published with a checkpoint.

    Attributes:
        values: Values by name.
        source: File that they were read from, for messages.
        keys: Names of the settings in the source, if they differ.
    """

    values: Mapping[str, Any]
    source: str
    keys: Mapping[str, str] = field(default_factory=dict)

    def value(self, name: str, setting: Setting | Choice) -> float | str:
        """Return a setting's checked value.

        Raises:
            ValueError: If it is missing or malformed.
        """
        value, key = self.values.get(name), self.keys.get(name, name)
        if value is None:
            raise ValueError(
                f"{self.source} has no {key}, which the model's denoising needs. Add it there, "
                f'or set it with --additional-config \'{{"diffusion": {{"{name}": ...}}}}\'.'
            )
        return _checked(key, value, setting, self.source)


def denoising_settings(
    vllm_config: VllmConfig, rule: DecodingRule, published: Published
) -> tuple[int, dict[str, float | str]]:
    """Resolve the step cap and the rule's settings.

    A start-up option comes first, then the preset, ``--diffusion-config`` and the published
    settings.

    Args:
        vllm_config: Configuration of the server.
        rule: Decoding rule.
        published: Settings published with the checkpoint.

    Raises:
        ValueError: Naming the unknown, missing or malformed setting, and how to set it.
    """
    chosen = plugin_settings(vllm_config)
    _check_names(chosen.of_rule, chosen.preset, rule)
    steps: Any = chosen.max_denoising_steps
    reason = rule.refused_settings.get("max_denoising_steps")
    if steps is not None and reason is not None:
        raise ValueError(
            f"{OPTION}: max_denoising_steps={steps!r} does not go with rule={chosen.rule!r}, {reason}; "
            "leave it out."
        )
    if steps is None and vllm_config.diffusion_config:
        steps = vllm_config.diffusion_config.max_denoising_steps
    if steps is None:
        steps = published.value("max_denoising_steps", MAX_STEPS)
    preset = {} if chosen.preset is None else rule.presets[chosen.preset]
    values: dict[str, float | str] = {}
    for name, setting in rule.settings.items():
        if chosen.of_rule.get(name) is not None:
            values[name] = _checked(name, chosen.of_rule[name], setting, OPTION)
        elif name in preset:
            values[name] = preset[name]
        else:
            values[name] = published.value(name, setting)
    if problem := rule.contradiction(values):
        raise ValueError(f"{problem[1]}.")
    return int(_checked("max_denoising_steps", steps, MAX_STEPS, "--diffusion-config")), values


def _check_names(of_rule: Mapping[str, Any], preset: str | None, rule: DecodingRule) -> None:
    for name in of_rule:
        if name not in rule.settings:
            known = ", ".join((*SETTINGS, *rule.settings))
            raise ValueError(f"{OPTION}: {name} is not known; known are {known}.")
    if preset is not None and preset not in rule.presets:
        names = " or ".join(f'"{choice}"' for choice in rule.presets)
        remedy = f"set it to {names}" if names else "this model has none, so leave it out"
        raise ValueError(f"{OPTION}: preset={preset!r} is not known; {remedy}.")


def _checked(name: str, value: Any, setting: Setting | Choice, source: str) -> float | str:
    if not setting.allows(value):
        raise ValueError(f"{source}: {name}={value!r} {setting.rule}.")
    checked: float | str = value
    return checked
