"""``vllm-diffusion bench-ways``: one model served by each of its rules, in one run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.cli import values
from vllm_diffusion.drafting.commands.bench_drafts import VLLM_OPTIONS, add_run_options, compare
from vllm_diffusion.drafting.commands.draft_runs import Contender, Result
from vllm_diffusion.drafting.commands.draft_table import DIFFUSION, MIXED
from vllm_diffusion.drafting.commands.prompt_sets import TINY_TASKS, add_prompts, given_prompts

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

# In the order of the tables: the others are compared with the first.
_EXACT = ("autoregressive", "linear_spec")
WAYS = (*_EXACT, DIFFUSION, MIXED)


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "bench-ways",
        help="measure a model as diffusion, token after token, and with its own drafts",
        description="Serve a model by each of its rules and by all, request by request; ask all servers the same, and "
        "compare tokens a second, what verifications kept, and passes and rows a token. Exit status 1 if a server failed, or if "
        "answers differ that are promised to be the same.",
        epilog=VLLM_OPTIONS,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model",
        nargs="?",
        type=values.model,
        help="what `vllm serve` takes; default: the tiny DiffusionGemma",
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        type=way,
        default=list(map(way, WAYS)),
        metavar="RULE[,SETTING=VALUE]",
        help=f"only these ({' '.join(WAYS)}), perhaps several of a rule: "
        "linear_spec,draft_length=8,draft_steps=2",
    )
    add_prompts(parser, 4, f". Default, for the tiny model alone: {TINY_TASKS}")
    add_run_options(parser, 1, 8, 32)
    parser.set_defaults(run=run)


def way(value: str) -> Contender:
    """Read ``RULE`` or ``RULE,SETTING=VALUE,...``, into a server with these settings.

    Raises:
        Refusal: If the rule is none of :data:`WAYS`, or a setting has no name or no value.
    """
    rule, *settings = value.split(",")
    pairs = [setting.partition("=") for setting in settings]
    if rule not in WAYS or not all(name and text for name, _, text in pairs):
        raise values.Refusal(
            f"{value!r} must be one of {', '.join(WAYS)}, perhaps with settings: "
            "linear_spec,draft_length=8,draft_steps=2."
        )
    # A server without a rule has the model's own.
    sections: dict[str, dict[str, Any]] = {DIFFUSION: {}, MIXED: {"rules": "all"}}
    section = sections.get(rule, {"rule": rule})
    for name, _, text in pairs:
        try:
            section[name] = json.loads(text)
        except ValueError:
            section[name] = text
    options = ("--additional-config", json.dumps({"diffusion": section})) if section else ()
    return Contender(value, options, rule, ("", *_EXACT) if rule == MIXED else ("",))


def run(arguments: argparse.Namespace) -> int:
    is_tiny = arguments.model is None
    most = max(arguments.concurrency)
    if is_tiny:
        # What is small here starts sooner.
        small = f"--max-model-len 1024 --max-num-seqs {most} --kv-cache-memory-bytes {64 * 2**20}"
        small += ' --limit-mm-per-prompt {"image":0,"video":0,"audio":0}'
        arguments.vllm_options = [*small.split(), *arguments.vllm_options]
    given = given_prompts(arguments, [TINY_TASKS] if is_tiny else [])
    # One task, and enough of it that as many requests run at a time as are requested.
    prompts = [replace(each, task="all") for each in islice(cycle(given), max(most, len(given)))]
    entrants = sorted(dict.fromkeys(arguments.ways), key=lambda each: WAYS.index(each.rule))
    differing: list[str] = []

    def conclude(results: Sequence[Result]) -> str:
        exact = [each for each in results if each.contender.rule in _EXACT and not each.failure]
        names = [each.contender.name for each in exact]
        if arguments.temperature or len(exact) < 2:
            return "No answers were compared: those of autoregressive and linear_spec at temperature 0 are."
        differing.extend(each.contender.name for each in exact if not each.answers_as(exact[0]))
        if differing:
            return f"Answers DIFFER from those of {names[0]}: {', '.join(differing)}."
        return f"All answers are the same, as promised: {', '.join(names)}."

    model = str(shipped_checkpoint() if is_tiny else arguments.model)
    return compare(model, entrants, prompts, arguments, conclude) or int(bool(differing))
