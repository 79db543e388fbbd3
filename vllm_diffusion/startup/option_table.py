"""The table of every option of ``vllm serve``: ``serve_options.toml``, read and checked."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

State = Literal["works", "refused", "unreached", "untried"]


@dataclass(frozen=True)
class OptionRow:
    """What is known of some options of ``vllm serve`` with a diffusion model.

    Attributes:
        names: As on the command line; ``"--option.setting"`` for a setting of a JSON option.
        state: See the head of the file.
        line: What the user sees where it is refused; ``{...}`` stands for a value.
        where: The file of this folder's package that refuses; empty for ``unsupported_options.py``.
        why: How it is known, or what a trial needs.
        probe: Options to try.
        works: Further options to try: other values that are served.
        tokens: ``"same"`` as without the option, or ``"other"``.
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
        """Every row says how its state is known.

        Raises:
            ValueError: Naming the row.
        """
        needs = {"works": self.probe or self.why, "refused": self.probe and self.line}
        needs |= {"unreached": self.why, "untried": self.why}
        if self.state not in get_args(State) or not needs[self.state] or not self.names:
            raise ValueError(f"serve_options.toml: the row of {self.names} is incomplete.")

    def explains(self, message: str) -> bool:
        """Whether ``message`` is this row's line with values in place."""
        parts = re.split(r"\{\w+\}", self.line)
        return re.fullmatch(".+?".join(map(re.escape, parts)), message) is not None


def read_rows() -> list[OptionRow]:
    """The rows, in the file's order.

    Raises:
        ValueError: If a row is incomplete.
        TypeError: If a row has a key that is none.
    """
    text = files(__package__).joinpath("serve_options.toml").read_text(encoding="utf-8")
    return [_row(settings) for settings in tomllib.loads(text)["option"]]


def refusal(name: str, **values: object) -> str:
    """The sentence with which an option is refused.

    Args:
        name: The option.
        values: What its sentence names.
    """
    (line,) = [row.line for row in read_rows() if name in row.names]
    return line.format(**values)


def _row(settings: dict[str, Any]) -> OptionRow:
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()
    }
    return OptionRow(**values)
