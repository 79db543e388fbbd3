"""Sections of ``--additional-config``, one for each part of the package that has settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def section_of(additional: object, name: str, option: str) -> Mapping[str, Any]:
    """Return a section; an empty one if it is not there.

    Args:
        additional: ``VllmConfig.additional_config``.
        name: Key of the section.
        option: How messages call it.

    Raises:
        ValueError: If it is no mapping.
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
