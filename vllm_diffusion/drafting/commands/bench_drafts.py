"""``vllm-diffusion bench-drafts``: one target with several drafts and with none, in one run."""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.cli import values
from vllm_diffusion.cli.checkpoint import (
    DRAFTED_FAMILY,
    begin_serving,
    shipped_checkpoint,
    shipped_draft,
)
from vllm_diffusion.cli.client import KEY_VARIABLE
from vllm_diffusion.cli.console import add_verbose, say
from vllm_diffusion.drafting.commands.contenders import (
    DFLASH,
    contenders,
    default_methods,
    draft_method,
    drafts_by_method,
)
from vllm_diffusion.drafting.commands.draft_runs import Contender, Plan, Result, race
from vllm_diffusion.drafting.commands.draft_table import as_json, tables
from vllm_diffusion.drafting.commands.prompt_sets import (
    TINY_TASKS,
    Prompt,
    add_prompts,
    given_prompts,
)
from vllm_diffusion.startup.environment import forces_cpu
from vllm_diffusion.startup.machine import working_accelerator

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

VLLM_OPTIONS = (
    "Other options, behind all of these, are those of `vllm serve`, such as --max-model-len 4096."
)


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "bench-drafts",
        help="measure drafts of an autoregressive model against none",
        description="Serve a target without a draft and with several, ask all servers the same, and compare "
        "tokens a second, time to the first token, memory, and what verifications kept, as the servers' own "
        "counters have it. Without arguments: the tiny pair that comes with this package.",
        epilog=VLLM_OPTIONS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "target",
        nargs="?",
        type=values.model,
        help="what `vllm serve` takes; default: the tiny target",
    )
    draft = (
        "DFlash drafts, and METHOD=MODEL for those of vLLM's other methods, such as eagle3=MODEL"
    )
    method = (
        "only these: dflash, adaptive (DFlash with as many tokens as pay), ngram, eagle3, draft_model, "
        "or another of vLLM's; default: all that have what they need"
    )
    url = (
        "servers that run already, or NAME=URL, each without a draft or with one; the others are compared "
        f"with the first. Their key is that of {KEY_VARIABLE}"
    )
    steps = "passes over a block, each a server of its own (1; 1 2 4 for the tiny pair)"
    for option, read, metavar, meaning in (
        ("--draft", values.named_model(draft_method), "MODEL", draft),
        ("--method", draft_method, "METHOD", method),
        ("--steps", values.integer(), "N", steps),
        ("--base-url", _server, "URL", url),
    ):
        parser.add_argument(option, nargs="+", type=read, default=[], metavar=metavar, help=meaning)
    values.add_number(
        parser, "--num-drafts", values.integer(), "tokens drafted where the draft has no block", 4
    )
    add_prompts(parser, 4, f". Default, for the tiny target alone: {TINY_TASKS}")
    add_run_options(parser)
    parser.set_defaults(run=run)


def add_run_options(parser: argparse.ArgumentParser, *requests: int) -> None:
    """Add the options of every comparison of servers, which :func:`compare` reads.

    Args:
        parser: Of the command.
        requests: At a time by default; 1 and 8 where none is given.
    """
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
    values.add_number(parser, "--temperature", values.temperature, meaning, 0.0, "X")
    parser.add_argument(
        "--one-at-a-time",
        action=argparse.BooleanOptionalAction,
        help="start each server when the one before it has ended, and not all of them side by side with "
        "their rounds interleaved; default where there is an accelerator",
    )
    parser.add_argument(
        "--json", type=values.new_file, metavar="FILE", help="write every figure there"
    )
    add_verbose(parser)
    # What is not known here is an option of `vllm serve`.
    parser.set_defaults(vllm_options=[])


def _server(value: str) -> tuple[str, str]:
    """Read ``URL`` or ``NAME=URL``, into a name and the root of a server."""
    name, is_named, url = value.partition("=")
    if not is_named or "://" in name:
        name, url = value, value
    return name, values.url(url)


def run(arguments: argparse.Namespace) -> int:
    if arguments.base_url:
        for name in ("target", "draft", "method", "steps", "vllm_options", "one_at_a_time"):
            if given := getattr(arguments, name):
                option = (given[0] if name == "vllm_options" else name).lstrip("-")
                raise values.UsageError(
                    f"--base-url measures servers that run, and {option.replace('_', '-')} is of servers "
                    "that are started; leave one of them out."
                )
        running = [Contender(name, url=url) for name, url in arguments.base_url]
        return compare("servers that run", running, given_prompts(arguments), arguments)
    is_tiny = arguments.target is None
    target = Path(shipped_checkpoint(DRAFTED_FAMILY) if is_tiny else arguments.target)
    drafts = drafts_by_method(arguments.draft)
    if is_tiny:
        drafts = {DFLASH: (str(shipped_draft(DRAFTED_FAMILY)),)} | drafts
        # What is small here starts sooner.
        small = f"--max-model-len 1024 --max-num-seqs 16 --kv-cache-memory-bytes {64 * 2**20}"
        arguments.vllm_options = [*small.split(), *arguments.vllm_options]
    prompts = given_prompts(arguments, [TINY_TASKS] if is_tiny else [])
    with tempfile.TemporaryDirectory(prefix="vllm-diffusion-") as scratch:
        entrants = contenders(
            target,
            drafts,
            methods=arguments.method or default_methods(drafts, adds_models=is_tiny),
            steps=arguments.steps or ([1, 2, 4] if is_tiny else [1]),
            num_drafts=arguments.num_drafts,
            scratch=Path(scratch),
        )
        return compare(str(target), entrants, prompts, arguments)


def compare(
    target: str,
    entrants: Sequence[Contender],
    prompts: Sequence[Prompt],
    arguments: argparse.Namespace,
    conclude: Callable[[Sequence[Result]], str] = lambda results: "",
) -> int:
    """Race servers, print the tables, write the figures, and return the exit status.

    Args:
        target: What is served.
        entrants: The baseline first.
        prompts: Of all tasks.
        arguments: Of :func:`add_run_options`.
        conclude: What is printed below the tables.
    """
    begin_serving()
    accelerator = None if forces_cpu() else working_accelerator()
    one_at_a_time = arguments.one_at_a_time
    if one_at_a_time is None:
        one_at_a_time = accelerator is not None and not any(each.url for each in entrants)
    plan = Plan(
        tuple(prompts),
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
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, "
        f"{accelerator or 'no accelerator'}",
        "versions": {name: version(name) for name in ("vllm-diffusion", "vllm", "torch")},
        "target": target,
        "serve_options": list(arguments.vllm_options),
        "prompts": {task: len(theirs) for task, theirs in plan.tasks().items()},
        "rounds": plan.num_rounds,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "one_at_a_time": one_at_a_time,
    }
    say("")
    figures = as_json(results, plan)
    print(f"{heading(about)}\n\n{tables(figures)}")
    if conclusion := conclude(results):
        print(conclusion)
    if arguments.json is not None:
        text = json.dumps({**about, "contenders": figures}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 1 if any(result.failure for result in results) else 0


def heading(about: dict[str, Any]) -> str:
    """Say what was measured, where and when."""
    prompts = about["prompts"]
    order = "one server at a time" if about["one_at_a_time"] else "side by side, rounds interleaved"
    law = "greedy" if about["temperature"] == 0 else f"temperature {about['temperature']:g}"
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    return (
        f"{about['target']}\n"
        f"{sum(prompts.values())} prompts of {', '.join(prompts)}; {law}, at most {about['max_tokens']} "
        f"tokens; {about['rounds']} rounds, {order}\n"
        f"{about['date']}; {about['machine']}; {versions}"
    )
