"""What a command says to whoever typed it, beside its output."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Print to standard error at once."""
    print(line, file=sys.stderr, flush=True)


def fail(message: str) -> int:
    """Say why a command ends; its exit status."""
    say(message)
    return 1
