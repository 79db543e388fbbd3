"""Settings of the plugin in ``--additional-config``, validated once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from vllm_diffusion.decoding.rule import MAX_STEPS

if TYPE_CHECKING:
    from attention_kernels.canvas_attention import Impl

OPTION = "--additional-config '{\"diffusion\": {...}}'"


@dataclass(frozen=True)
class PluginSettings:
    """Settings in ``--additional-config '{"diffusion": {...}}'``.

    ``None`` leaves a setting to the checkpoint's ``generation_config.json``.

    Attributes:
        max_denoising_steps: Step cap of every canvas, 1 to 10,000.
        window_anchor: ``"canvas"`` ties the sliding window of a canvas row to its canvas, as the
            reference implementation does; ``"query"`` to the row, as stock vLLM does.
        attention: Implementation of :func:`attention_kernels.canvas_attention`: ``"auto"``,
            ``"reference"``, ``"triton"`` or ``"cute"``.
        rule: Name of the model's decoding rule; ``None`` for the checkpoint's own.
        rules: Names of the rules that requests may choose from by ``diffusion_rule``; ``"all"`` for
            all of the model's ways, ``None`` for none but ``rule``.
        draft_length: Positions of a draft of the rule ``linear_spec``, its certain first one among
            them.
        draft_steps: Steps of such a draft.
        draft_adapter: Folder, or repository, of the LoRA that acts on such drafts; ``None`` for the
            checkpoint's own.
        preset: Name of a set of settings of the rule, for settings that are not set by themselves.
        converge_at_end: True to judge a canvas by its positions up to its first end token only,
            since the positions after it are discarded.
        never_empty: True to forbid end tokens as the first token of an answer, after a thought too.
        of_rule: All other settings, which the model's decoding rule knows and checks.
    """

    max_denoising_steps: int | None = None
    window_anchor: Literal["canvas", "query"] = "canvas"
    attention: Impl = "auto"
    rule: str | None = None
    rules: Sequence[str] | Literal["all"] | None = None
    draft_length: int | None = None
    draft_steps: int | None = None
    draft_adapter: str | None = None
    preset: str | None = None
    converge_at_end: bool = False
    never_empty: bool = False
    of_rule: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from attention_kernels.canvas_attention import Impl, WindowAnchor

        for name in ("max_denoising_steps", "draft_steps", "draft_length"):
            value = getattr(self, name)
            if value is not None and not MAX_STEPS.allows(value):
                raise ValueError(f"{name}={value!r} {MAX_STEPS.requirement}.")
        if not isinstance(self.draft_adapter, str | None):
            raise ValueError(f"draft_adapter={self.draft_adapter!r} must be the path of a folder.")
        check_choices(self, {"window_anchor": get_args(WindowAnchor), "attention": get_args(Impl)})
        if self.rules != "all" and not isinstance(self.rules, list | tuple | None):
            raise ValueError(f'rules={self.rules!r} must be "all" or a list of names.')
        for name in ("converge_at_end", "never_empty"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r} must be true or false.")


# Settings that every model has.
SETTINGS = tuple(each.name for each in fields(PluginSettings) if each.name != "of_rule")


def plugin_settings(additional: object) -> PluginSettings:
    """Parse and validate ``additional["diffusion"]``.

    Args:
        additional: ``VllmConfig.additional_config``.

    Raises:
        ValueError: Naming the setting, what it got and what is allowed.
    """
    section = section_of(additional, "diffusion", OPTION)
    own = {name: value for name, value in section.items() if name in SETTINGS}
    of_rule = {name: value for name, value in section.items() if name not in SETTINGS}
    try:
        return PluginSettings(**own, of_rule=of_rule)
    except ValueError as error:
        raise ValueError(f"{OPTION}: {error}") from None


def section_of(additional: object, name: str, option: str) -> Mapping[str, Any]:
    """Return a section; an empty one if it is not there.

    Args:
        additional: ``VllmConfig.additional_config``.
        name: Key of the section.
        option: How messages call it.

    Raises:
        ValueError: If it is not a mapping.
    """
    section = additional.get(name, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(section, Mapping):
        raise ValueError(f"{option}: {name} must be a mapping; got {section!r}.")
    return section


def check_choices(settings: object, choices: Mapping[str, Iterable[str]]) -> None:
    """Refuse a setting that is none of a few words.

    Args:
        settings: Has the settings as attributes.
        choices: Allowed words by the setting's name.

    Raises:
        ValueError: Naming the setting, what it got and what is allowed.
    """
    for name, known in choices.items():
        value = getattr(settings, name)
        if value not in known:
            names = " or ".join(f'"{choice}"' for choice in known)
            raise ValueError(f"{name}={value!r} is not known; set it to {names}.")
