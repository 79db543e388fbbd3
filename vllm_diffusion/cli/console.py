"""What a command says to whoever typed it, beside its output."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings

VERBOSE_HELP = "print vLLM's own lines too, which are otherwise shown only if it fails"


def add_verbose(parser: argparse.ArgumentParser) -> None:
    """Add the option that shows a server's own lines."""
    parser.add_argument("--verbose", action="store_true", help=VERBOSE_HELP)


def quieten() -> None:
    """Hide what vLLM and torch print while they work, but for errors. Call it before they are imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def say(line: str) -> None:
    """Print to standard error at once."""
    print(line, file=sys.stderr, flush=True)


def fail(message: str) -> int:
    """Say why a command ends; its exit status."""
    say(message)
    return 1
