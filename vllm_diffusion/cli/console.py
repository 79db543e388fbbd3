"""Output of the commands: tables, messages on standard error, and errors on one line."""

import argparse
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence

# Characters of a line that no table reaches.
_WIDTH = 100_000
VERBOSE_HELP = "also print vLLM's log, which is otherwise shown only on failure"


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add the option that shows a server's own lines."""
    parser.add_argument("--verbose", action="store_true", help=VERBOSE_HELP)


class CommandError(Exception):
    """Failure of a command. The message is for the user; the exit status is 1."""


def quieten() -> None:
    """Hide what vLLM and torch print while they work, but for errors. Call it before they are
    imported.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def say(line: str) -> None:
    """Print to standard error at once."""
    print(line, file=sys.stderr, flush=True)


def fail(message: str) -> int:
    """Print why a command ends, and return its exit status."""
    say(message)
    return 1


def table(rows: Iterable[Sequence[str]], *, indent: str = "", figures: bool = False) -> str:
    """Lay rows out in columns, two spaces apart.

    The text is the same in a terminal and in a pipe: no line is wrapped, cut or styled.

    Args:
        rows: Cells. A row may end before the others do.
        indent: Begins each line.
        figures: Whether all columns but the first are aligned on the right.
    """
    # Importing rich takes a tenth of a second, which only commands with a table spend.
    from rich.console import Console
    from rich.table import Table

    rows = list(rows)
    grid = Table.grid(padding=(0, 2, 0, 0))
    for column in range(max(map(len, rows), default=0)):
        grid.add_column(justify="right" if figures and column else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    text = io.StringIO()
    plain = Console(file=text, width=_WIDTH, color_system=None, markup=False, emoji=False)
    plain.print(grid, highlight=False)
    return "\n".join(indent + line.rstrip() for line in text.getvalue().splitlines())


def one_line(error: Exception) -> str:
    """Return an error's message on one line, without the frame that pydantic puts around it."""
    message = str(error)
    if callable(errors := getattr(error, "errors", None)):
        message = "; ".join(str(each["msg"]).removeprefix("Value error, ") for each in errors())
    return " ".join(message.split()) or type(error).__name__
