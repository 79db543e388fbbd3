"""What is tried of the options of ``vllm serve``: ``serve_options.toml``, read."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """Options of ``vllm serve``, and trials of them.

    Attributes:
        refused: What is refused, on the command line, by the option that is named in the refusal.
        served: Options that are served with the tokens of a server without them.
        served_with_other_tokens: Options that are served, and change the answers.
        known: Names of all options that are not refused.
    """

    refused: dict[str, str]
    served: tuple[str, ...]
    served_with_other_tokens: tuple[str, ...]
    known: tuple[str, ...]


def _read() -> Options:
    content = tomllib.loads(Path(__file__).with_name("serve_options.toml").read_text("utf-8"))
    return Options(
        content["refused"],
        tuple(content["served"]),
        tuple(content["served_with_other_tokens"]),
        tuple(content["known"].split()),
    )


OPTIONS = _read()


def explains(sentence: str, message: str) -> bool:
    """Return true if ``message`` is a refusal's sentence with values in its places."""
    parts = re.split(r"\{[\w.]+\}", sentence)
    return re.fullmatch(".+?".join(map(re.escape, parts)), message) is not None
