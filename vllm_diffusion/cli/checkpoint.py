"""``vllm-diffusion checkpoint``: where the shipped checkpoint is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Subcommands = argparse._SubParsersAction[argparse.ArgumentParser]

FOLDER = Path(__file__).resolve().parents[1] / "checkpoints" / "tiny_diffusion_gemma"
_NEEDED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "checkpoint",
        help="print the path of the shipped checkpoint",
        description='Print the path of the shipped checkpoint: vllm serve "$(%(prog)s)".',
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    try:
        print(shipped_checkpoint())
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def shipped_checkpoint() -> Path:
    """Folder of the tiny DiffusionGemma that comes with this package.

    Raises:
        FileNotFoundError: If the installation lacks one of its files.
    """
    for name in _NEEDED:
        if not (FOLDER / name).is_file():
            raise FileNotFoundError(
                f"The shipped checkpoint has no {FOLDER / name}; install vllm-diffusion again."
            )
    return FOLDER
