"""Default settings of a decoding rule, for requests that set none."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.decoding.rule import MAX_STEPS, Choice, DecodingRule, Setting
from vllm_diffusion.startup.plugin_settings import OPTION, SETTINGS, PluginSettings
from vllm_diffusion.weights.regular_files import json_object

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger("vllm.vllm_diffusion")


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
            ValueError: If it is malformed.
        """
        return _checked(self.keys.get(name, name), self.values[name], setting, self.source)

    def check_present(self, names: Iterable[str]) -> None:
        """Refuse settings without any of these values, naming all of them.

        Raises:
            ValueError: Naming the file's fields and the option.
        """
        missing = [name for name in names if self.values.get(name) is None]
        if missing:
            section = json.dumps({"diffusion": dict.fromkeys(missing, "...")}).replace(
                '"..."', "..."
            )
            raise ValueError(
                f"{self.source} has no {', '.join(self.keys.get(name, name) for name in missing)}, which "
                f"the model's denoising needs. Add {'it' if len(missing) == 1 else 'them'} there, or set "
                f"--additional-config '{section}'."
            )


def denoising_settings(
    chosen: PluginSettings, max_steps: int | None, rule: DecodingRule, published: Published
) -> tuple[int, dict[str, float | str]]:
    """Resolve the step cap and the rule's settings.

    A start-up option comes first, then the preset, ``--diffusion-config`` and the published
    settings.

    Args:
        chosen: The operator's settings.
        max_steps: The cap in ``--diffusion-config``; ``None`` without one.
        rule: Decoding rule.
        published: Settings published with the checkpoint.

    Raises:
        ValueError: Naming the unknown, missing or malformed setting, and how to set it.
    """
    _check_names(chosen.of_rule, chosen.preset, rule)
    for name, reason in rule.refused_settings.items():
        if (value := getattr(chosen, name)) is not None:
            raise ValueError(
                f"{OPTION}: {name}={value!r} does not apply to this server's decoding rule, {reason}; leave it out."
            )
    steps: Any = chosen.max_denoising_steps
    if "max_denoising_steps" in rule.refused_settings:
        steps = chosen.draft_steps or 1
    if steps is None:
        steps = max_steps
    preset = {} if chosen.preset is None else rule.presets[chosen.preset]
    published.check_present(
        [
            *(["max_denoising_steps"] if steps is None else []),
            *(
                name
                for name in rule.settings
                if chosen.of_rule.get(name) is None and name not in preset
            ),
        ]
    )
    if steps is None:
        steps = published.value("max_denoising_steps", MAX_STEPS)
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


def canvas_length(chosen: PluginSettings, most: int, default: int | None) -> int:
    """Return the length of canvases: that of drafts, where they are drafts.

    Args:
        chosen: The operator's settings.
        most: Canvas length of the checkpoint or the operator.
        default: Positions of a canvas if the operator sets none; ``None`` for ``most``.

    Raises:
        ValueError: If a draft is longer than a canvas.
    """
    if (length := chosen.draft_length) is not None and length > most:
        raise ValueError(
            f"{OPTION}: draft_length={length} must be at most {most}, the positions of a canvas; lower it."
        )
    return length or min(default or most, most)


def _check_names(of_rule: Mapping[str, Any], preset: str | None, rule: DecodingRule) -> None:
    for name in of_rule:
        if name not in rule.settings:
            known = ", ".join((*SETTINGS, *rule.settings))
            raise ValueError(f"{OPTION}: {name} is unknown; this server knows {known}.")
    if preset is not None and preset not in rule.presets:
        names = " or ".join(f'"{choice}"' for choice in rule.presets)
        remedy = f"set it to {names}" if names else "this model has none, so leave it out"
        raise ValueError(f"{OPTION}: preset={preset!r} is not known; {remedy}.")


def _checked(name: str, value: Any, setting: Setting | Choice, source: str) -> float | str:
    if not setting.allows(value):
        raise ValueError(f"{source}: {name}={value!r} {setting.requirement}.")
    checked: float | str = value
    return checked


def checkpoint_settings(
    model_config: ModelConfig, defaults: Mapping[str, Any], keys: Mapping[str, str | None]
) -> Published:
    """Read a checkpoint's own settings from ``generation_config.json``.

    Args:
        model_config: Configuration of the checkpoint.
        defaults: The family's settings by name, for those that the file leaves out.
        keys: The publisher's names of settings, by ours, and ``None`` for settings that are not
            read. They are not read from a file that ``transformers`` derived from ``config.json``
            either: it has the defaults of the publisher's class, which nobody chose.
    """
    generation, source = generation_config(model_config)
    defaults_only = {name for name, key in keys.items() if key is None}
    theirs = {name: key for name, key in keys.items() if key and name not in generation}
    if generation.get("_from_model_config"):
        unread = [f"{key}={generation[key]!r}" for key in theirs.values() if key in generation]
        if unread:
            logger.info(
                "%s: ignoring %s, since the file has the defaults of the publisher's class "
                "(_from_model_config).",
                source,
                ", ".join(unread),
            )
        theirs = {}
    own = {name: theirs.get(name, name) for name in defaults}
    values = {
        name: defaults[name] if name in defaults_only else generation.get(key, defaults[name])
        for name, key in own.items()
    }
    return Published(values, source, theirs)


def generation_config(model_config: ModelConfig) -> tuple[Mapping[str, Any], str]:
    """Read the checkpoint's generation settings; return them and the name of their source.

    A null stands for a field that is left out, as in ``transformers``.
    """
    folder = model_config.generation_config
    if folder in ("auto", "vllm"):
        folder = model_config.hf_config_path or model_config.model
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        try:
            content = json_object(path)
        except ValueError as error:
            raise ValueError(f"{path} {error}; correct it, or copy the checkpoint again.") from None
        source = str(path)
    else:
        # A checkpoint on the hub: vLLM knows how to find it.
        content = model_config.try_get_generation_config()
        source = f"generation_config.json of {folder}"
    return {name: value for name, value in content.items() if value is not None}, source
