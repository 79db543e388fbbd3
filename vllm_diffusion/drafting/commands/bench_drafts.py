"""``vllm-diffusion bench-drafts``: one target with several drafts and with none, in one run."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

from vllm_diffusion.checkpoints import DRAFTED_FAMILY, shipped_checkpoint, shipped_draft
from vllm_diffusion.cli import values
from vllm_diffusion.cli.checkpoint import begin_serving
from vllm_diffusion.cli.console import add_verbose, say
from vllm_diffusion.drafting.commands.contenders import (
    DFLASH,
    TINY_METHODS,
    contenders,
    draft_method,
    named_draft,
)
from vllm_diffusion.drafting.commands.draft_runs import Contender, Plan, Result, race
from vllm_diffusion.drafting.commands.draft_table import tables
from vllm_diffusion.drafting.commands.gone_options import add_gone
from vllm_diffusion.drafting.commands.prompt_sets import (
    TINY_TASKS,
    Prompt,
    add_prompts,
    by_task,
    given_prompts,
)
from vllm_diffusion.startup.environment import forces_cpu
from vllm_diffusion.startup.machine import working_accelerator

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

VLLM_OPTIONS = "Other options, after these, are those of `vllm serve`: --max-model-len 4096."


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "bench-drafts",
        help="measure drafts of an autoregressive model against none",
        description="Serve a target without a draft and with several, ask all servers the same, and compare "
        "tokens a second, time to the first token, and what verifications kept, as the servers' own counters "
        "have it. Without arguments: the tiny pair that comes with this package.",
        epilog=VLLM_OPTIONS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "target",
        nargs="?",
        type=values.model,
        help="what `vllm serve` takes; default: the tiny target",
    )
    draft = "DFlash drafts, and METHOD=MODEL for other methods of vLLM's, such as eagle3=MODEL"
    method = (
        "only these: dflash, adaptive (DFlash with as many tokens as pay), ngram, eagle3, draft_model, "
        "or another of vLLM's; default: ngram, and those of --draft"
    )
    steps = "passes over a block, each a server of its own (1; 1 2 4 for the tiny pair)"
    for option, read, metavar, meaning in (
        ("--draft", named_draft, "MODEL", draft),
        ("--method", draft_method, "METHOD", method),
        ("--steps", values.integer(), "N", steps),
    ):
        parser.add_argument(option, nargs="+", type=read, default=[], metavar=metavar, help=meaning)
    values.add_number(
        parser, "--num-drafts", values.integer(), "tokens drafted where the draft has no block", 4
    )
    add_prompts(parser, 4, f". Default, for the tiny target alone: {TINY_TASKS}")
    add_run_options(parser)
    instead = "name a target: servers are started here; `vllm bench serve` measures one that runs."
    add_gone(parser, "--base-url", instead)
    parser.set_defaults(run=run)


def add_run_options(parser: argparse.ArgumentParser, *requests: int) -> None:
    """Add the options that :func:`compare` reads; by default 1 and 8 ``requests`` at a time."""
    default = list(requests or (1, 8))
    parser.add_argument(
        "--concurrency",
        "--requests",
        nargs="+",
        type=values.integer(),
        default=default,
        metavar="N",
        help=f"requests at a time ({' '.join(map(str, default))})",
    )
    values.add_number(parser, "--rounds", values.integer(), "that count", 3)
    values.add_number(parser, "--max-tokens", values.integer(), "of an answer", 256)
    meaning = "of the answers; above 0 they are not compared"
    values.add_number(parser, "--temperature", values.number(0), meaning, 0.0, "X")
    parser.add_argument(
        "--one-at-a-time",
        action=argparse.BooleanOptionalAction,
        help="start each server when the one before it has ended, and not all of them side by side with "
        "their rounds interleaved; default where there is an accelerator",
    )
    parser.add_argument(
        "--json", type=values.new_file, metavar="FILE", help="write what each round counted there"
    )
    add_verbose(parser)
    # What is not known here is an option of `vllm serve`.
    parser.set_defaults(vllm_options=[])


def run(arguments: argparse.Namespace) -> int:
    target, drafts, methods = arguments.target, arguments.draft, arguments.method
    steps, default = arguments.steps or [1], []
    if target is None:
        target, default = str(shipped_checkpoint(DRAFTED_FAMILY)), [TINY_TASKS]
        drafts = [*drafts, (DFLASH, str(shipped_draft(DRAFTED_FAMILY)))]
        methods = methods or TINY_METHODS
        steps = arguments.steps or [1, 2, 4]
        # What is small here starts sooner.
        small = f"--max-model-len 1024 --max-num-seqs 16 --kv-cache-memory-bytes {64 * 2**20}"
        arguments.vllm_options = [*small.split(), *arguments.vllm_options]
    prompts = given_prompts(arguments, default)
    entrants = contenders(drafts, methods=methods, steps=steps, num_drafts=arguments.num_drafts)
    return compare(target, entrants, prompts, arguments)


def compare(
    target: str,
    entrants: Sequence[Contender],
    prompts: Sequence[Prompt],
    arguments: argparse.Namespace,
    conclude: Callable[[Sequence[Result]], str] = lambda results: "",
) -> int:
    """Race servers, print the tables, write what was counted, and return the exit status.

    Args:
        target: What is served.
        entrants: The baseline first.
        prompts: Prompts of all tasks.
        arguments: Values of :func:`add_run_options`.
        conclude: Makes what is printed below the tables.
    """
    begin_serving()
    accelerator = None if forces_cpu() else working_accelerator()
    one_at_a_time = arguments.one_at_a_time
    if one_at_a_time is None:
        one_at_a_time = accelerator is not None
    plan = Plan(
        by_task(prompts),
        tuple(dict.fromkeys(arguments.concurrency)),
        arguments.rounds,
        arguments.max_tokens,
        arguments.temperature,
    )
    results = race(
        target,
        entrants,
        plan,
        serve_options=arguments.vllm_options,
        verbose=arguments.verbose,
        one_at_a_time=one_at_a_time,
    )
    order = "one server at a time" if one_at_a_time else "side by side, rounds interleaved"
    law = f"temperature {plan.temperature:g}" if plan.temperature else "greedy"
    versions = ", ".join(f"{name} {version(name)}" for name in ("vllm-diffusion", "vllm", "torch"))
    heading = (
        f"{target}\n{len(prompts)} prompts of {', '.join(plan.tasks)}; {law}, at most "
        f"{plan.max_tokens} tokens; {plan.num_rounds} rounds, {order}\n"
        f"{datetime.now(UTC).isoformat(timespec='seconds')}; {len(os.sched_getaffinity(0))} cores, "
        f"{platform.machine()}, {accelerator or 'no accelerator'}; {versions}"
    )
    say("")
    print(f"{heading}\n\n{tables(results, plan)}")
    if conclusion := conclude(results):
        print(conclusion)
    if arguments.json is not None:
        content = {"about": heading, "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 1 if any(result.failure for result in results) else 0
