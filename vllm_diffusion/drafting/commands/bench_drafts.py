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
from vllm_diffusion.cli.checkpoint import DRAFTED_FAMILY, shipped_checkpoint, shipped_draft
from vllm_diffusion.cli.console import add_verbose, fail, say
from vllm_diffusion.cli.shipped_server import end_with_signals
from vllm_diffusion.drafting.commands.draft_runs import Contender, Plan, Result, race
from vllm_diffusion.drafting.commands.draft_table import as_json, tables
from vllm_diffusion.drafting.commands.prompt_sets import (
    NAMES,
    TINY_TASKS,
    Prompt,
    read_prompts,
    source,
)
from vllm_diffusion.startup.accelerators import working_accelerator
from vllm_diffusion.startup.environment import environment_flags

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

DFLASH, ADAPTIVE, NGRAM, DRAFT_MODEL, EAGLE3 = (
    "dflash",
    "adaptive",
    "ngram",
    "draft_model",
    "eagle3",
)
# vLLM's methods; those of models with heads for it (MTP) have names of their own too, in _mtp.
METHODS = (
    *(DFLASH, ADAPTIVE, NGRAM, EAGLE3, DRAFT_MODEL),
    *("dspark", "eagle", "mtp", "ngram_gpu", "suffix"),
)
# Those whose tokens come from the text so far, from the target's own heads, or from the target.
_WITHOUT_A_DRAFT = (NGRAM, DRAFT_MODEL, "mtp", "ngram_gpu", "suffix")
# What vLLM looks for in the text so far: its own default is five tokens, no less.
_NGRAM = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
VLLM_OPTIONS = (
    "Other options, behind all of these, are those of `vllm serve`, such as --max-model-len 4096."
)
# Of the shipped target: what is small here starts sooner.
_TINY_OPTIONS = (
    *("--max-model-len", "1024"),
    *("--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", str(64 * 2**20)),
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
    parser.add_argument(
        "--draft",
        nargs="+",
        type=values.named_model(_method),
        default=[],
        metavar="MODEL",
        help="DFlash drafts, and METHOD=MODEL for those of vLLM's other methods, such as eagle3=MODEL",
    )
    parser.add_argument(
        "--method",
        nargs="+",
        type=_method,
        metavar="METHOD",
        help="only these: dflash, adaptive (DFlash with as many tokens as pay), ngram, eagle3, draft_model, "
        "or another of vLLM's; default: all that have what they need",
    )
    parser.add_argument(
        "--steps",
        nargs="+",
        type=values.integer(),
        metavar="N",
        help="passes over a block, each a server of its own (1; 1 2 4 for the tiny pair)",
    )
    parser.add_argument(
        "--num-drafts",
        type=values.integer(),
        default=4,
        metavar="N",
        help="tokens drafted where the draft has no block (%(default)s)",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        type=source,
        metavar="FILE_OR_NAME",
        help='JSON lines with "prompt" (text or token ids to go on with), "messages" or "turns", and '
        f'perhaps "task"; or {", ".join(NAMES)}. Default, for the tiny target alone: {TINY_TASKS}',
    )
    parser.add_argument(
        "--num-prompts",
        type=values.integer(),
        default=4,
        metavar="N",
        help="of each task (%(default)s)",
    )
    add_run_options(parser)
    parser.set_defaults(run=run)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """What every comparison of servers takes; :func:`compare` reads it."""
    parser.add_argument(
        "--concurrency",
        nargs="+",
        type=values.integer(),
        default=[1, 8],
        metavar="N",
        help="requests at a time (1 8)",
    )
    parser.add_argument(
        "--rounds", type=values.integer(), default=3, metavar="N", help="that count (%(default)s)"
    )
    parser.add_argument(
        "--max-tokens",
        type=values.integer(),
        default=256,
        metavar="N",
        help="of an answer (%(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=values.temperature,
        default=0.0,
        metavar="X",
        help="of the answers; above 0 they are not compared (%(default)s)",
    )
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


def _method(value: str) -> str:
    """A way to draft that vLLM has."""
    if value not in METHODS and not value.endswith("_mtp"):
        raise values.Refusal(f"{value!r} must be one of {', '.join(METHODS)}, or a name in _mtp.")
    return value


def run(arguments: argparse.Namespace) -> int:
    is_tiny = arguments.target is None
    try:
        target = Path(shipped_checkpoint(DRAFTED_FAMILY) if is_tiny else arguments.target)
        drafts = drafts_by_method(arguments.draft)
        if is_tiny:
            drafts = {DFLASH: (str(shipped_draft(DRAFTED_FAMILY)),)} | drafts
            arguments.vllm_options = [*_TINY_OPTIONS, *arguments.vllm_options]
        sources = arguments.data or ([TINY_TASKS] if is_tiny else [])
        if not sources:
            raise values.UsageError(
                f"--data is missing: give a file of JSON lines, or {', '.join(NAMES)}."
            )
        prompts = [
            prompt for each in sources for prompt in read_prompts(each, arguments.num_prompts)
        ]
        with tempfile.TemporaryDirectory(prefix="vllm-diffusion-") as scratch:
            entrants = contenders(
                target,
                drafts,
                methods=arguments.method,
                steps=arguments.steps or ([1, 2, 4] if is_tiny else [1]),
                num_drafts=arguments.num_drafts,
                scratch=Path(scratch),
                adds_models=is_tiny,
            )
            return compare(str(target), entrants, prompts, arguments)
    except FileNotFoundError as error:
        return fail(str(error))


def drafts_by_method(given: Sequence[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Models of ``--draft``, by the method that each is of."""
    found: dict[str, tuple[str, ...]] = {}
    for method, model in given:
        name = method or DFLASH
        found[name] = (*found.get(name, ()), model)
    return found


def contenders(
    target: Path,
    drafts: dict[str, tuple[str, ...]],
    *,
    methods: Sequence[str] | None,
    steps: Sequence[int],
    num_drafts: int,
    scratch: Path,
    adds_models: bool,
) -> list[Contender]:
    """No draft, and every way to draft that was asked for.

    Args:
        target: Of all of them.
        drafts: Models by method.
        methods: Which; ``None`` for those that have what they need.
        steps: Passes of DFlash drafts.
        num_drafts: Tokens of those without a block.
        scratch: Where a draft may be written.
        adds_models: Whether EAGLE-3 and ``draft_model`` take part without a model of theirs, with one
            that stands for it.

    Raises:
        UsageError: If a method has no draft, or a draft cannot be read.
    """
    if methods is None:
        methods = [*(DFLASH, ADAPTIVE) * (DFLASH in drafts), NGRAM]
        methods += [DRAFT_MODEL, EAGLE3] if adds_models else []
        methods += [each for each in drafts if each not in methods]
    for method in methods:
        named = DFLASH if method == ADAPTIVE else method
        is_given = bool(drafts.get(named)) or method in _WITHOUT_A_DRAFT
        if not is_given and not (method == EAGLE3 and (target / "config.json").is_file()):
            given = "MODEL" if named == DFLASH else f"{method}=MODEL"
            raise values.UsageError(f"--method {method} needs a draft: give --draft {given}.")
    found = [Contender("no draft")]
    for method in methods:
        models = drafts.get(DFLASH if method == ADAPTIVE else method, ())
        note = ""
        if not models and method == DRAFT_MODEL:
            models, note = (str(target),), "the target itself, for want of a smaller model"
        elif not models and method == EAGLE3:
            # torch is imported by those alone who need it.
            from vllm_diffusion.drafting.untrained_eagle3 import save_untrained_eagle3

            models = (str(save_untrained_eagle3(target, scratch / EAGLE3)),)
            note = "untrained: random weights, only to see what a draft of this kind costs"
        for model in models or (None,):
            name = method if len(models) < 2 else f"{method} {Path(model or '').name}"
            config: dict[str, Any] = {"method": method, "num_speculative_tokens": num_drafts}
            if model is not None:
                config["model"] = model
            if method == NGRAM:
                config |= _NGRAM
            if method not in (DFLASH, ADAPTIVE):
                found.append(Contender(name, _options(config), note))
                continue
            if method == ADAPTIVE:
                found.append(Contender(name, dflash_options(str(model), {"adaptive": True})))
                continue
            for passes in steps:
                # One pass is what stock has.
                settings = {"steps": passes} if passes > 1 else {}
                each = name if len(steps) == 1 else f"{name}, {passes} pass{'es' * (passes > 1)}"
                options = dflash_options(str(model), settings)
                found.append(Contender(each, options, passes=passes))
    return found


def dflash_options(model: str, settings: dict[str, Any] | None = None) -> tuple[str, ...]:
    """Of ``vllm serve``, for a DFlash draft and the whole of its blocks.

    Args:
        model: The draft.
        settings: Of ``additional_config["drafting"]``.

    Raises:
        UsageError: As :func:`block_size_of`.
    """
    return _options(
        {
            "method": DFLASH,
            "num_speculative_tokens": block_size_of(model) - 1,
            "model": model,
        },
        settings,
    )


def _options(
    speculative: dict[str, Any], drafting: dict[str, Any] | None = None
) -> tuple[str, ...]:
    options = ["--speculative-config", json.dumps(speculative)]
    if drafting:
        options += ["--additional-config", json.dumps({"drafting": drafting})]
    return tuple(options)


def block_size_of(model: str) -> int:
    """Anchor and masks of a DFlash draft's block, by its ``config.json``.

    Raises:
        UsageError: If there is none, or it does not say.
    """
    file = Path(model) / "config.json"
    try:
        if file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
        else:
            from transformers import PreTrainedConfig

            config, _ = PreTrainedConfig.get_config_dict(model)
    except (OSError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise values.UsageError(
            f"--draft {model}: its config.json cannot be read: {said}"
        ) from None
    block_size = config.get("block_size")
    if not isinstance(block_size, int) or block_size < 2:
        raise values.UsageError(
            f"--draft {model}: block_size={block_size!r} in its config.json is not that of a DFlash draft; "
            "a draft of another method is given as METHOD=MODEL."
        )
    return block_size


def compare(
    target: str,
    entrants: Sequence[Contender],
    prompts: Sequence[Prompt],
    arguments: argparse.Namespace,
    conclude: Callable[[Sequence[Result]], str] = lambda results: "",
) -> int:
    """Race servers, print the tables and write the figures; the command's exit status.

    Args:
        target: What is served.
        entrants: The baseline first.
        prompts: Of all tasks.
        arguments: Of :func:`add_run_options`.
        conclude: What is printed below the tables.
    """
    if environment_flags().disabled:
        return fail("VLLM_DIFFUSION_DISABLE=1 turns vllm-diffusion off; unset it.")
    end_with_signals()
    one_at_a_time: bool | None = arguments.one_at_a_time
    if one_at_a_time is None:
        one_at_a_time = _has_accelerator()
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
        say=say,
    )
    about = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
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
    print(heading(about))
    print(f"\n{tables(results, plan)}")
    if conclusion := conclude(results):
        print(conclusion)
    if arguments.json is not None:
        text = json.dumps({**about, "contenders": as_json(results, plan)}, indent=1)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 1 if any(result.failure for result in results) else 0


def heading(about: dict[str, Any]) -> str:
    """What was measured, where and when."""
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


def machine() -> str:
    """Cores, architecture and accelerator."""
    found = working_accelerator() if _has_accelerator() else None
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {platform.machine()}, {found or 'no accelerator'}"


def _has_accelerator() -> bool:
    return not environment_flags().force_cpu and working_accelerator() is not None
