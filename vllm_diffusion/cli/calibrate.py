"""``vllm-diffusion calibrate``: a draft trained on the traffic of its own server."""

from __future__ import annotations

import argparse
import json
import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.cli.console import fail
from vllm_diffusion.drafting.recording import clear_recording, read_recording

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "calibrate",
        help="train a draft on what its server is asked",
        description="Record a server's traffic.",
    )
    steps = parser.add_subparsers(metavar="STEP", required=True)
    for add_step in (_add_record,):
        add_step(steps)


def _add_record(steps: Subcommands) -> None:
    parser = steps.add_parser(
        "record",
        help="show or clear what a server has recorded, and how to have one record",
        description="Show what is recorded in a folder, and print the command of a server that records "
        "there. Servers record nothing unless they are told to.",
    )
    parser.add_argument("folder", type=Path, help="of the recording")
    parser.add_argument(
        "--max-mib", type=int, default=64, help="of the printed command (%(default)s)"
    )
    parser.add_argument("--clear", action="store_true", help="delete what is recorded")
    parser.set_defaults(run=record)


def record(arguments: argparse.Namespace) -> int:
    folder = arguments.folder.expanduser().absolute()
    if arguments.clear:
        try:
            print(f"{clear_recording(folder)} files deleted of {folder}.")
        except OSError as error:
            return fail(f"{folder} cannot be cleared: {error.strerror}.")
        return 0
    print(_described(folder))
    settings = {"drafting": {"record": {"folder": str(folder), "max_mib": arguments.max_mib}}}
    words = ["vllm", "serve", "MODEL", "--additional-config", json.dumps(settings)]
    print(f"To record, with the draft's --speculative-config or without:\n{shlex.join(words)}")
    return 0


def _described(folder: Path) -> str:
    try:
        recording = read_recording(folder)
    except ValueError as error:
        return str(error)
    exchanges = recording.exchanges
    answers = sum(len(each.output_token_ids) for each in exchanges)
    prompts = sum(len(each.prompt_token_ids) for each in exchanges)
    oldest, newest = (
        datetime.fromtimestamp(each.time).isoformat(" ", "seconds")
        for each in (exchanges[0], exchanges[-1])
    )
    lines = [
        f"{len(exchanges)} exchanges from {oldest} to {newest}",
        f"{prompts} tokens of prompts, {answers} of answers",
        f"{sum(each.is_held_out for each in exchanges)} exchanges are held out of training",
    ]
    if recording.num_damaged:
        lines.append(f"{recording.num_damaged} half-written lines were passed over")
    return "\n".join(lines)
