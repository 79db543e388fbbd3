"""``vllm-diffusion calibrate``: a draft trained on the traffic of its own server."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

from vllm_diffusion.cli import values
from vllm_diffusion.cli.answer import AnswerError, first_model
from vllm_diffusion.cli.client import openai_client
from vllm_diffusion.cli.console import CommandError, say
from vllm_diffusion.drafting.commands import recalibrate, train_draft
from vllm_diffusion.drafting.commands.prompt_sets import add_prompts, answer, given_prompts
from vllm_diffusion.drafting.commands.swap_draft import add_server

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

_REPORT_SECONDS = 5.0
# Prompts that fail in a row until the server is given up: a single one may be too long for it.
_MAX_FAILURES = 16


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "calibrate",
        help="train a draft on the recorded requests of a server",
        description="Fill a server's recording, train a draft on it, or train whenever the server is idle.",
    )
    steps = parser.add_subparsers(metavar="STEP", required=True)
    for add_step in (
        _add_collect,
        train_draft.add_parser,
        recalibrate.add_parser,
    ):
        add_step(steps)


def _add_collect(steps: Subcommands) -> None:
    parser = steps.add_parser(
        "collect",
        help="send prompts to a server that records",
        description="Send all prompts of files to a running server, so that its recording fills.",
    )
    add_server(parser)
    add_prompts(parser, 1000)
    values.add_number(parser, "--concurrency", values.integer(), "requests at a time", 8)
    values.add_number(parser, "--max-tokens", values.integer(), "longest answer, in tokens", 1024)
    parser.set_defaults(run=collect)


def collect(arguments: argparse.Namespace) -> int:
    prompts = given_prompts(arguments)
    client = openai_client(arguments.url, arguments.api_key)
    failures = in_a_row = num_tokens = 0
    start = reported = time.monotonic()
    pool = ThreadPoolExecutor(arguments.concurrency)
    try:
        options: dict[str, Any] = {"model": first_model(client), "max_tokens": arguments.max_tokens}
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
