"""``vllm-diffusion drafts``: which published draft goes with a target, and how to serve both."""

from __future__ import annotations

import argparse
import json
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.cli import values
from vllm_diffusion.cli.console import table

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

_FILE = Path(__file__).resolve().parents[1] / "presets.toml"


@dataclass(frozen=True)
class Preset:
    """A target and the draft that was published for it.

    Attributes:
        target: Its repository.
        draft: The draft's repository.
        causal: Which of its layers see no row ahead.
        window: What is known of one.
        listed_as: What the source calls the target, where its repository is inferred from that.
        block: Anchor and masks of a block; 0 where the sources do not say.
        issues: What users reported.
        options: Further options of ``vllm serve`` that its publisher gives.
        sources: Where block, causal, window and options are from.
    """

    target: str
    draft: str
    causal: str = "not known here; vLLM takes layers of type sliding_attention for causal, unless config.json sets it"
    window: str = "not known here; drafting.window of --additional-config sets one"
    listed_as: str = ""
    block: int = 0
    issues: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """Command that serves both, for a shell, with the publisher's block where that of the draft
        is unknown.
        """
        spec = {
            "method": "dflash",
            "model": self.draft,
            "num_speculative_tokens": (self.block or _DEFAULT_BLOCK) - 1,
        }
        arguments = ["vllm", "serve", self.target, "--speculative-config", json.dumps(spec)]
        return shlex.join([*arguments, *self.options])


# z-lab's drafts, where nothing else is stated: its command line for vLLM proposes 15.
_DEFAULT_BLOCK = 16


def presets() -> list[Preset]:
    """Read all presets, in the order of the file."""
    content = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    general = content["general"]["issues"]
    return [
        Preset(**entry | {"issues": (*entry.get("issues", ()), *general)})
        for entry in content["preset"]
    ]


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
        block = f"not known; inferred below from z-lab's own {_DEFAULT_BLOCK}: config.json has block_size"
    inferred = f" (inferred: listed as {preset.listed_as})" if preset.listed_as else ""
    rows = [
        ("target", f"{preset.target}{inferred}"),
        ("draft", preset.draft),
        ("block", block),
        ("causal", preset.causal),
        ("window", preset.window),
        *(("source", source) for source in preset.sources),
        *(("known", issue) for issue in preset.issues),
    ]
    return f"{table(rows)}\n{preset.command}"
