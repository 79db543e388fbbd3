"""Table of every option of ``vllm serve``: ``serve_options.toml``, read and checked."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

State = Literal["works", "refused", "unreached", "untried"]


@dataclass(frozen=True)
class OptionRow:
    """Row of the table: options of ``vllm serve`` that behave alike with a diffusion model.

    Attributes:
        names: Names on the command line; ``"--option.setting"`` for a setting of a JSON option.
        state: State, as explained at the head of the file.
        line: Message of the refusal; ``{...}`` stands for a value.
        where: File of this package that refuses; empty for ``unsupported_options.py``.
        why: Evidence for the state, or what a trial needs.
        probe: Command-line options of a trial.
        works: Further options for trials: other values that are served.
        tokens: ``"same"`` if answers are those without the option, or ``"other"``.
    """

    names: tuple[str, ...]
    state: State
    line: str = ""
    where: str = ""
    why: str = ""
    probe: str = ""
    works: tuple[str, ...] = ()
    tokens: Literal["same", "other"] = "same"

    def __post_init__(self) -> None:
        """Check that the row has the evidence that its state needs.

        Raises:
            ValueError: Naming the row.
        """
        needs = {"works": self.probe or self.why, "refused": self.probe and self.line}
        needs |= {"unreached": self.why, "untried": self.why}
        if self.state not in get_args(State) or not needs[self.state] or not self.names:
            raise ValueError(f"serve_options.toml: the row of {self.names} is incomplete.")

    def explains(self, message: str) -> bool:
        """Return true if ``message`` is this row's line with values in place."""
        parts = re.split(r"\{\w+\}", self.line)
        return re.fullmatch(".+?".join(map(re.escape, parts)), message) is not None


def read_rows() -> list[OptionRow]:
    """Read the rows, in the file's order.

    Raises:
        ValueError: If a row is incomplete.
        TypeError: If a row has an unknown key.
    """
    text = files(__package__).joinpath("serve_options.toml").read_text(encoding="utf-8")
    return [_row(settings) for settings in tomllib.loads(text)["option"]]


def refusal(name: str, **values: object) -> str:
    """Return the message with which an option is refused.

    Args:
        name: Name of the option.
        values: Values for the message's placeholders.
    """
    (line,) = [row.line for row in read_rows() if name in row.names]
    return line.format(**values)


def _row(settings: dict[str, Any]) -> OptionRow:
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
    }
    return OptionRow(**values)
