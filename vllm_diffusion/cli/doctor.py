"""``vllm-diffusion doctor``: what this machine would serve with, and what is wrong with it."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from vllm_diffusion.cli.console import quieten
from vllm_diffusion.cli.diagnosis import Fact, Mark, sections

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
    print(
        "Looking at this machine; importing vLLM takes some seconds.", file=sys.stderr, flush=True
    )
    num_problems = num_warnings = 0
    for title, facts in sections():
        print(f"\n{title}")
        print("\n".join(lines(facts)), flush=True)
        num_problems += sum(fact.mark is Mark.PROBLEM for fact in facts)
        num_warnings += sum(fact.mark is Mark.WARNING for fact in facts)
    print()
    noted = f" ({num_warnings} warning{'s' if num_warnings > 1 else ''})" if num_warnings else ""
    if num_problems:
        print(f"This machine cannot serve yet: {num_problems} to mend, marked problem{noted}.")
        return 1
    print(f"This machine can serve{noted}. Try: vllm-diffusion demo")
    return 0


def lines(facts: list[Fact]) -> list[str]:
    """One aligned line per fact, and a second one where there is something to do."""
    width = max((len(fact.name) for fact in facts), default=0)
    out = []
    for fact in facts:
        out.append(f"  {fact.mark.value:<7}  {fact.name:<{width}}  {fact.value}".rstrip())
        if fact.remedy:
            out.append(f"  {'':<7}  {'':<{width}}  -> {fact.remedy}")
    return out
