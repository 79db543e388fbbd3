"""``vllm-diffusion checkpoint``: paths of the shipped checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.cli.console import CommandError
from vllm_diffusion.cli.values import UsageError

if TYPE_CHECKING:
    from vllm_diffusion.cli.values import Parser

    Subcommands = argparse._SubParsersAction[Parser]

_FOLDER = Path(__file__).resolve().parents[1] / "checkpoints"
# The folder of each family's checkpoint; the first is the default.
FOLDERS = {
    "diffusion_gemma": _FOLDER / "tiny_diffusion_gemma",
    "sdar": _FOLDER / "tiny_sdar",
    "qwen3": _FOLDER / "tiny_qwen3",
}
# What drafts for those of them that are autoregressive.
DRAFT_FOLDERS = {"qwen3": _FOLDER / "tiny_qwen3_dflash"}
DRAFTED_FAMILY = next(iter(DRAFT_FOLDERS))
DEFAULT_FAMILY = next(iter(FOLDERS))
_NEEDED_OF_DRAFT = ("config.json", "model.safetensors")
_NEEDED = (*_NEEDED_OF_DRAFT, "generation_config.json", "tokenizer.json")


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "checkpoint",
        help="print the path of a shipped checkpoint",
        description='Print the path of a shipped checkpoint: vllm serve "$(%(prog)s)".',
    )
    add_family(parser)
    parser.add_argument(
        "--draft",
        action="store_true",
        help=f"the path of the draft of an autoregressive one ({', '.join(DRAFT_FOLDERS)})",
    )
    parser.set_defaults(run=run)


def add_family(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses among the shipped checkpoints; :func:`family_of` reads it."""
    parser.add_argument(
        "--family",
        choices=tuple(FOLDERS),
        help=f"which of the shipped checkpoints: %(choices)s ({DEFAULT_FAMILY})",
    )


def family_of(arguments: argparse.Namespace) -> str:
    """Return the requested family; where its draft is requested, one that has a draft.

    Raises:
        UsageError: If the family has no draft, and one was asked for.
    """
    family: str | None = arguments.family
    if not getattr(arguments, "draft", False):
        return family or DEFAULT_FAMILY
    if family not in (None, *DRAFT_FOLDERS):
        raise UsageError(
            f"--draft: the shipped checkpoint of {family} has no draft; set --family to "
            f"{' or '.join(DRAFT_FOLDERS)}, or leave it out."
        )
    return family or DRAFTED_FAMILY


def run(arguments: argparse.Namespace) -> int:
    find = shipped_draft if arguments.draft else shipped_checkpoint
    print(find(family_of(arguments)))
    return 0


def shipped_checkpoint(family: str = DEFAULT_FAMILY) -> Path:
    """Return the folder of a tiny checkpoint that comes with this package.

    Args:
        family: A key of ``FOLDERS``.

    Raises:
        CommandError: If the installation lacks one of its files.
    """
    return _complete(FOLDERS[family], _NEEDED)


def shipped_draft(family: str = DRAFTED_FAMILY) -> Path:
    """Return the folder of the draft that comes with a tiny checkpoint.

    Args:
        family: A key of ``DRAFT_FOLDERS``.

    Raises:
        CommandError: If the installation lacks one of its files.
    """
    return _complete(DRAFT_FOLDERS[family], _NEEDED_OF_DRAFT)


def _complete(folder: Path, needed: tuple[str, ...]) -> Path:
    for name in needed:
        if not (folder / name).is_file():
            raise CommandError(
                f"The shipped checkpoint has no {folder / name}; install vllm-diffusion again."
            )
    return folder
