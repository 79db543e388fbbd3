"""``vllm-diffusion models``: published checkpoints that are served, with the command line of
each.
"""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from vllm_diffusion.cli.console import CommandError, table
from vllm_diffusion.startup.published_checkpoints import checkpoint_families
from vllm_diffusion.startup.unserved_models import unserved_models, unserved_sentence

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "models",
        help="list the published checkpoints that are served",
        description="List published checkpoints with their sizes, licences and the command lines that serve them. "
        "Memory of a GPU is an estimate: weights and 4 GB.",
    )
    parser.add_argument(
        "words", nargs="*", metavar="WORD", help="only those with each word in family or id"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    words = [word.lower() for word in arguments.words]
    found = False
    for family in checkpoint_families():
        rows = [
            checkpoint
            for checkpoint in family.checkpoint
            if all(word in f"{family.name} {checkpoint.id}".lower() for word in words)
        ]
        if not rows:
            continue
        if found:
            print()
        print(f"{family.name} ({family.architecture})")
        found = True
        print(f"  checked: {family.checked}\n  open: {family.open}")
        cells = [
            (row.id, f"{row.billions:g}B", row.format, row.memory, row.licence) for row in rows
        ]
        head = ("", "size", "format", "GPU", "licence")
        print(table([head, *cells], indent="  "))
        print(f"  {family.command(rows[0])}")
    if not found:
        asked = " ".join(arguments.words).lower()
        for name in unserved_models():
            if re.search(rf"(?<![a-z]){re.escape(name.lower())}(?![a-z])", asked):
                raise CommandError(unserved_sentence(name))
        raise CommandError(
            f"No checkpoint has {' and '.join(arguments.words)} in its name; `vllm-diffusion models` lists all."
        )
    return 0
