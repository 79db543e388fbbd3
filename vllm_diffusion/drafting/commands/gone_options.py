"""Options that commands had, refused by name before anything is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any


def add_gone(parser: argparse.ArgumentParser, option: str, instead: str) -> None:
    """Have a parser refuse an option, which would else be handed to vLLM with those it does not know.

    Args:
        parser: Parser of the command.
        option: Name of the option.
        instead: What does instead.
    """
    parser.add_argument(
        option,
        nargs=0,
        action=GoneOption,
        const=instead,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )


class GoneOption(argparse.Action):
    """Option that ends the process with what does instead."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        parser.error(f"{option_string} is gone: {self.const}")
