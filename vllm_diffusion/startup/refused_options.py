"""Sentences with which options of ``vllm serve`` are refused, from ``refused_options.toml``."""

from __future__ import annotations

import functools
import tomllib
from importlib.resources import files


@functools.cache
def sentences() -> dict[str, str]:
    """Read the sentences, by the option's name; ``{...}`` in one stands for a value."""
    text = files(__package__).joinpath("refused_options.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def refusal(name: str, **values: object) -> str:
    """Return the message with which an option is refused.

    Args:
        name: Name of the option.
        values: Values for the message's placeholders.
    """
    return sentences()[name].format(**values)
