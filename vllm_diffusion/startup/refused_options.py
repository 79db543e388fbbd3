"""Sentences with which options of ``vllm serve`` are refused, from ``refused_options.toml``."""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files
from typing import Any


@functools.cache
def _entries() -> dict[str, dict[str, str]]:
    text = files(__package__).joinpath("refused_options.toml").read_text(encoding="utf-8")
    entries: dict[str, Any] = tomllib.loads(text)
    return {
        name: {"sentence": entry} if isinstance(entry, str) else entry
        for name, entry in entries.items()
    }


def sentences() -> dict[str, str]:
    """Return the sentences by the option's name; ``{...}`` in one stands for a value."""
    return {name: entry["sentence"] for name, entry in _entries().items()}


def refused_fields() -> dict[str, str]:
    """Return the fields of vLLM's configuration that must be unset, by the option's name."""
    return {name: entry["field"] for name, entry in _entries().items() if "field" in entry}


def refusal(name: str, **values: object) -> str:
    """Return the message with which an option is refused.

    Args:
        name: Name of the option.
        values: Values for the message's placeholders.
    """
    return sentences()[name].format(**values)
