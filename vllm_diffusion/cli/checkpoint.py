"""``vllm-diffusion checkpoint``: where the shipped checkpoints are."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]

_FOLDER = Path(__file__).resolve().parents[1] / "checkpoints"
# The folder of each family's checkpoint; the first is the default.
FOLDERS = {
    "diffusion_gemma": _FOLDER / "tiny_diffusion_gemma",
    "sdar": _FOLDER / "tiny_sdar",
}
DEFAULT_FAMILY = next(iter(FOLDERS))
_NEEDED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "checkpoint",
        help="print the path of a shipped checkpoint",
        description='Print the path of a shipped checkpoint: vllm serve "$(%(prog)s)".',
    )
    add_family(parser)
    parser.set_defaults(run=run)


def add_family(parser: argparse.ArgumentParser) -> None:
    """The option that chooses among the shipped checkpoints."""
    parser.add_argument(
        "--family",
        choices=tuple(FOLDERS),
        default=DEFAULT_FAMILY,
        help="which of the shipped checkpoints: %(choices)s (%(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        print(shipped_checkpoint(arguments.family))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def shipped_checkpoint(family: str = DEFAULT_FAMILY) -> Path:
    """Folder of a tiny checkpoint that comes with this package.

    Args:
        family: A key of ``FOLDERS``.

    Raises:
        FileNotFoundError: If the installation lacks one of its files.
    """
    folder = FOLDERS[family]
    for name in _NEEDED:
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"The shipped checkpoint has no {folder / name}; install vllm-diffusion again."
            )
    return folder
