"""``vllm-diffusion drafts``: which published draft goes with a target, and how to serve both."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from vllm_diffusion.cli import values
from vllm_diffusion.cli.console import table
from vllm_diffusion.drafting.presets import DEFAULT_BLOCK, Preset, presets

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "drafts",
        help="list published drafts and how to serve them",
        description="Show the published DFlash draft of a target, what is known about it, and the command "
        "that serves both. Nothing is downloaded.",
    )
    parser.add_argument("target", nargs="?", help="a target, or the end of its name (default: all)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    known = presets()
    if arguments.target is None:
        print(table([(preset.target, preset.draft) for preset in known]))
        return 0
    wanted = arguments.target.lower().rstrip("/")
    matching = [
        p for p in known if wanted in (p.target.lower(), p.target.lower().rpartition("/")[2])
    ]
    if not matching:
        names = ", ".join(preset.target for preset in known)
        raise values.UsageError(
            f"argument target: no published draft is known for {arguments.target!r}; known targets: {names}."
        )
    print("\n\n".join(describe(preset) for preset in matching))
    return 0


def describe(preset: Preset) -> str:
    """Describe a preset, the command last."""
    block = f"{preset.block} (num_speculative_tokens {preset.block - 1})"
    if not preset.block:
        block = f"not known; inferred below from z-lab's own {DEFAULT_BLOCK}: config.json has block_size"
    inferred = f" (inferred: listed as {preset.listed_as})" if preset.listed_as else ""
    rows = [
        ("target", f"{preset.target}{inferred}"),
        ("draft", preset.draft),
        ("block", block),
        ("causal", preset.causal),
        ("window", preset.window),
        ("kept", f"tokens a verification: {preset.figures or 'not known here'}"),
        *(("source", source) for source in preset.sources),
        *(("known", issue) for issue in preset.issues),
    ]
    return f"{table(rows)}\n{preset.command}"
