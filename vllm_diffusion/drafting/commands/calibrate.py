"""``vllm-diffusion calibrate``: a draft trained on the traffic of its own server."""

from __future__ import annotations

import argparse
import json
import shlex
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.cli import values
from vllm_diffusion.cli.answer import AnswerError, first_model
from vllm_diffusion.cli.client import openai_client
from vllm_diffusion.cli.console import CommandError, add_verbose, fail, one_line, quieten, say
from vllm_diffusion.drafting.commands import recalibrate, train_draft
from vllm_diffusion.drafting.commands.contenders import draft_config
from vllm_diffusion.drafting.commands.prompt_sets import add_prompts, answer, given_prompts
from vllm_diffusion.drafting.commands.swap_draft import add_server
from vllm_diffusion.drafting.recording import Exchange, clear_recording, read_recording

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

_REPORT_SECONDS = 5.0
# Prompts that fail in a row until the server is given up: a single one may be too long for it.
_MAX_FAILURES = 16


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "calibrate",
        help="train a draft on the requests of its server",
        description="Record a server's traffic, extract its target's hidden states, and train a draft.",
    )
    steps = parser.add_subparsers(metavar="STEP", required=True)
    for add_step in (
        _add_record,
        _add_collect,
        _add_extract,
        train_draft.add_parser,
        recalibrate.add_parser,
    ):
        add_step(steps)


def _add_record(steps: Subcommands) -> None:
    parser = steps.add_parser(
        "record",
        help="show or clear what a server has recorded, and how to have one record",
        description="Show what is recorded in a folder, and print the command of a server that records "
        "there. Servers record nothing without the settings in it.",
    )
    parser.add_argument("folder", type=values.folder, help="of the recording")
    values.add_number(parser, "--max-mib", values.integer(), "of the printed command", 64)
    parser.add_argument("--clear", action="store_true", help="delete what is recorded")
    parser.set_defaults(run=record)


def record(arguments: argparse.Namespace) -> int:
    folder = arguments.folder.absolute()
    if arguments.clear:
        try:
            print(f"{clear_recording(folder)} files deleted of {folder}.")
        except OSError as error:
            return fail(f"{folder} cannot be cleared: {error.strerror}.")
        return 0
    print(_described(folder))
    settings = {"drafting": {"record": {"folder": str(folder), "max_mib": arguments.max_mib}}}
    command = ["vllm", "serve", "MODEL", "--additional-config", json.dumps(settings)]
    print(f"To record, with the draft's --speculative-config or without:\n{shlex.join(command)}")
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


def _add_collect(steps: Subcommands) -> None:
    parser = steps.add_parser(
        "collect",
        help="ask a server that records a set of prompts",
        description="Ask a server that runs all prompts of files, so that its recording fills. "
        "`calibrate record` prints the command of a server that records, and what it has recorded.",
    )
    add_server(parser)
    add_prompts(parser, 1000)
    values.add_number(parser, "--concurrency", values.integer(), "requests at a time", 8)
    values.add_number(parser, "--max-tokens", values.integer(), "of an answer", 1024)
    meaning = "of the answers (default: the server's own)"
    values.add_number(parser, "--temperature", values.number(0), meaning, metavar="X")
    parser.set_defaults(run=collect)


def collect(arguments: argparse.Namespace) -> int:
    prompts = given_prompts(arguments)
    client = openai_client(arguments.url, arguments.api_key)
    failures = in_a_row = num_tokens = 0
    start = reported = time.monotonic()
    pool = ThreadPoolExecutor(arguments.concurrency)
    try:
        options: dict[str, Any] = {"model": first_model(client), "max_tokens": arguments.max_tokens}
        if arguments.temperature is not None:
            options["temperature"] = arguments.temperature
        futures = [pool.submit(answer, client, prompt, options) for prompt in prompts]
        for done, future in enumerate(as_completed(futures), start=1):
            try:
                num_tokens += len(future.result())
                in_a_row = 0
            except AnswerError as error:
                failures, in_a_row = failures + 1, in_a_row + 1
                if failures == 1:
                    say(f"A prompt failed, and the others go on: {error}")
                if in_a_row == _MAX_FAILURES:
                    raise CommandError(
                        f"{in_a_row} prompts in a row failed, the last so: {error}"
                    ) from None
            now = time.monotonic()
            if now - reported >= _REPORT_SECONDS:
                reported = now
                say(f"{now - start:5.0f} s  {done} of {len(prompts)} prompts, {num_tokens} tokens")
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        # Requests that are open end with their connections.
        client.close()
    print(
        f"{len(prompts) - failures} of {len(prompts)} prompts answered, {num_tokens} tokens in "
        f"{time.monotonic() - start:.0f} s."
    )
    return int(failures > 0)


def _add_extract(steps: Subcommands) -> None:
    parser = steps.add_parser(
        "extract",
        help="read recorded traffic once more, and keep the target's hidden states",
        description="Replay recorded tokens through vLLM's own extraction of hidden states, the newest "
        "first, and write what `calibrate train` reads.",
        epilog="Other options are vLLM's for the target, such as --tensor-parallel-size 2.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "target", type=values.model, help="whose traffic was recorded; a folder or a repository"
    )
    _add_recording(parser)
    parser.add_argument("--out", type=values.folder, required=True, help="a new folder")
    layers = parser.add_mutually_exclusive_group(required=True)
    layers.add_argument(
        "--draft", type=values.draft, help="a draft whose target_layer_ids are extracted"
    )
    layers.add_argument(
        "--layer-ids",
        type=values.layer_ids,
        help="layers of the target instead, such as 1,9,17,25,33",
    )
    values.add_number(parser, "--max-mib", values.integer(), "of hidden states on disk", 4096)
    values.add_number(parser, "--max-length", values.integer(2), "tokens of a sequence", 4096)
    add_verbose(parser)
    parser.set_defaults(run=extract, vllm_options=[])


def _add_recording(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recording", type=values.path, help="a folder of a server, or a file of JSON lines"
    )


def _exchanges(path: Path) -> list[Exchange]:
    """Read what is recorded there.

    Raises:
        UsageError: If it is nothing.
    """
    try:
        return read_recording(path).exchanges
    except ValueError as error:
        raise values.UsageError(f"argument recording: {error}") from None


def extract(arguments: argparse.Namespace) -> int:
    exchanges = _exchanges(arguments.recording)
    layers = arguments.layer_ids or _layers_of(arguments.draft)
    if not arguments.verbose:
        quieten()
    try:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        from vllm_diffusion.drafting.calibration import extract as extraction

        parser = EngineArgs.add_cli_args(
            FlexibleArgumentParser(prog="vllm-diffusion calibrate extract")
        )
        known = parser.parse_args(["--model", arguments.target, *arguments.vllm_options])
        done = extraction.extract(
            EngineArgs.from_cli_args(known),
            exchanges,
            layers,
            arguments.out,
            max_bytes=arguments.max_mib * 2**20,
            max_length=arguments.max_length,
            report=say,
        )
    except ValueError as error:
        return fail(one_line(error))
    for why, count in done.left_out.items():
        if count:
            say(f"{count} exchanges {why} and are left out.")
    if done.num_cut:
        say(f"{done.num_cut} sequences are cut to {arguments.max_length} tokens (--max-length).")
    print(
        f"{done.num_samples} samples, {done.num_tokens} tokens, {done.num_bytes / 2**20:.1f} MiB in {arguments.out}"
    )
    return 0


def _layers_of(draft: Path) -> list[int]:
    """Read the ids of the target's layers that a draft reads.

    Raises:
        UsageError: If its ``config.json`` does not name them.
    """
    layers = draft_config(str(draft)).get("dflash_config", {}).get("target_layer_ids")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise values.UsageError(
            f"--draft: {draft / 'config.json'} has no dflash_config.target_layer_ids; name the folder of a "
            "DFlash draft, or the layers with --layer-ids."
        )
    return layers
