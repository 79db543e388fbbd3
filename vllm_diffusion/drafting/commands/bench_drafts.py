"""``vllm-diffusion bench-drafts``: one target, served in several ways that are asked the same."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import cycle, islice
from typing import TYPE_CHECKING

from vllm_diffusion.checkpoints import DRAFTED_FAMILY, shipped_checkpoint, shipped_draft
from vllm_diffusion.cli import values
from vllm_diffusion.cli.checkpoint import begin_serving
from vllm_diffusion.cli.console import add_verbose, say
from vllm_diffusion.drafting.commands.contenders import (
    DFLASH,
    EXACT,
    TINY_METHODS,
    WAYS,
    contenders,
    named_draft,
    named_method,
)
from vllm_diffusion.drafting.commands.draft_runs import (
    Plan,
    Result,
    of_the_card,
    race,
)
from vllm_diffusion.drafting.commands.draft_table import tables
from vllm_diffusion.drafting.commands.prompt_sets import (
    TINY_TASKS,
    add_prompts,
    by_task,
    given_prompts,
)
from vllm_diffusion.startup.environment import forces_cpu
from vllm_diffusion.startup.machine import working_accelerator

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

# What is small here starts sooner.
_SMALL = ("--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 * 2**20))
_NO_PICTURES = ("--limit-mm-per-prompt", '{"image":0,"video":0,"audio":0}')


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "bench-drafts",
        help="measure drafts against none, or a diffusion model's ways to decode",
        description="Serve a target in several ways, send every server the same requests, and compare tokens a second, "
        "time to the first token and accepted draft tokens (from the servers' counters). The target is an "
        "autoregressive model, without a draft and with several, or a diffusion model in several of its ways. Without "
        "arguments: the tiny pair that comes with this package. Exit status 1 if a server failed, or if answers differ "
        "that must be the same.",
        epilog="Other options go to `vllm serve`, such as --max-model-len 4096.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "target",
        nargs="?",
        type=values.model,
        help="what `vllm serve` takes; default: the tiny target, or for ways the tiny DiffusionGemma",
    )
    draft = "DFlash drafts, uno=ADAPTER for a Uno's LoRA, and METHOD=MODEL for methods of vLLM's, such as eagle3=MODEL"
    method = (
        "compare only these: dflash, adaptive (DFlash with as many tokens as pay), ngram, uno, eagle3, draft_model, or "
        f"another of vLLM's; default: ngram, and those of --draft. Or ways of a diffusion model: {' '.join(WAYS)}. With "
        "settings: dflash,steps=2 or linear_spec,draft_length=8"
    )
    concurrency = "requests at a time (default: 1 8; for ways 1 8 32)"
    for option, read, metavar, meaning in (
        ("--draft", named_draft, "MODEL", draft),
        ("--method", named_method, "METHOD", method),
        ("--concurrency", values.integer(), "N", concurrency),
    ):
        parser.add_argument(option, nargs="+", type=read, default=[], metavar=metavar, help=meaning)
    add_prompts(parser, 4, f". Default, for the tiny models alone: {TINY_TASKS}")
    values.add_number(parser, "--rounds", values.integer(), "measured rounds", 3)
    values.add_number(parser, "--max-tokens", values.integer(), "longest answer, in tokens", 256)
    meaning = "sampling temperature; above 0 answers are not compared"
    values.add_number(parser, "--temperature", values.number(0), meaning, 0.0, "X")
    parser.add_argument(
        "--one-at-a-time",
        action=argparse.BooleanOptionalAction,
        help="run one server after another, not all side by side with interleaved rounds (default with an "
        "accelerator)",
    )
    parser.add_argument(
        "--json",
        type=values.new_file,
        metavar="FILE",
        help="write the counts of each round to this file",
    )
    add_verbose(parser)
    # What is not known here is an option of `vllm serve`.
    parser.set_defaults(run=run, vllm_options=[])


def run(arguments: argparse.Namespace) -> int:
    target, drafts, methods = arguments.target, arguments.draft, arguments.method
    has_ways = any(method.name in WAYS for method in methods)
    concurrencies = tuple(dict.fromkeys(arguments.concurrency)) or (1, 8, 32)[: 2 + has_ways]
    options = arguments.vllm_options
    if target is None:
        options = [*_SMALL, "--max-num-seqs", str(max(16, *concurrencies)), *options]
        if has_ways:
            target, options = str(shipped_checkpoint()), [*_NO_PICTURES, *options]
        else:
            target = str(shipped_checkpoint(DRAFTED_FAMILY))
            drafts = [*drafts, (DFLASH, str(shipped_draft(DRAFTED_FAMILY)))]
            methods = methods or map(named_method, TINY_METHODS)
    prompts = given_prompts(arguments, [] if arguments.target else [TINY_TASKS])
    if has_ways:
        # One task, and enough of it that as many requests run at a time as are requested.
        num_prompts = max(*concurrencies, len(prompts))
        prompts = [replace(each, task="all") for each in islice(cycle(prompts), num_prompts)]
    entrants = contenders(list(methods), drafts, target)
    begin_serving()
    accelerator = None if forces_cpu() else working_accelerator()
    one_at_a_time = arguments.one_at_a_time
    if one_at_a_time is None:
        one_at_a_time = accelerator is not None
    plan = Plan(
        by_task(prompts),
        concurrencies,
        arguments.rounds,
        arguments.max_tokens,
        arguments.temperature,
    )
    results = race(
        target,
        entrants,
        plan,
        serve_options=options,
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
    is_broken = has_ways and _differ(results, plan)
    if arguments.json is not None:
        measured = [asdict(each) | {"of_the_card": of_the_card(each)} for each in results]
        content = {"about": heading, "results": measured}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(is_broken or any(result.failure for result in results))


def _differ(results: Sequence[Result], plan: Plan) -> bool:
    """Print whether ways that are promised to answer alike did, and return true if they did not."""
    exact = [each for each in results if each.contender.way in EXACT and not each.failure]
    if plan.temperature or len(exact) < 2:
        print(f"No answers were compared: those of {' and '.join(EXACT)} at temperature 0 are.")
        return False
    names = [each.contender.name for each in exact]
    differing = [each.contender.name for each in exact if not each.answers_as(exact[0])]
    if differing:
        print(f"Answers DIFFER from those of {names[0]}: {', '.join(differing)}.")
    else:
        print(f"All answers are the same, as promised: {', '.join(names)}.")
    return bool(differing)
