"""``vllm-diffusion doctor``: what this machine would serve with, and what is wrong with it."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from vllm_diffusion.cli.console import quieten, say, table
from vllm_diffusion.cli.diagnosis import SECTIONS, Fact, Mark, safely

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="say what this machine would serve with, and how to mend what is wrong",
        description="Print versions, the accelerator, and the platform, model class and attention "
        "that would be used; exit status 1 if this machine cannot serve.",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    quieten()
    say("Looking at this machine; importing vLLM takes some seconds.")
    marks: Counter[Mark] = Counter()
    for title, find in SECTIONS.items():
        facts = safely(find)
        print(f"\n{title}\n{lines(facts)}", flush=True)
        marks.update(fact.mark for fact in facts)
    problems, warnings = marks[Mark.PROBLEM], marks[Mark.WARNING]
    noted = f" ({warnings} warning{'s' if warnings > 1 else ''})" if warnings else ""
    if problems:
        print(f"\nThis machine cannot serve yet: {problems} to mend, marked problem{noted}.")
        return 1
    print(f"\nThis machine can serve{noted}. Try: vllm-diffusion demo")
    return 0


def lines(facts: list[Fact]) -> str:
    """Write one aligned line per fact, and a second one where there is something to do."""
    rows = []
    for fact in facts:
        # Marks are as wide in each section.
        rows.append((f"{fact.mark.value:<{len(Mark.PROBLEM.value)}}", fact.name, fact.value))
        if fact.remedy:
            rows.append(("", "", f"-> {fact.remedy}"))
    return table(rows, indent="  ")
