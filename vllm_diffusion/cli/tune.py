"""``vllm-diffusion tune``: measures which of the kernels that are right is the fastest on this GPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_diffusion.cli import values
from vllm_diffusion.cli.console import fail, one_line, quieten, say
from vllm_diffusion.cli.values import UsageError
from vllm_diffusion.startup.machine import nvidia_lack

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_diffusion.cli.checkpoint import Subcommands
    from vllm_diffusion.kernel_choice.cases import KernelCase
    from vllm_diffusion.kernel_choice.process import Outcome
    from vllm_diffusion.kernel_choice.tuning import Answer, Check, Question
    from vllm_diffusion.startup.kernel_choices import KernelChoices

LENGTHS, REQUESTS = (1024, 8192, 32768), (1, 8)
# Seconds that checks, and measurements, may take at the most; each case has its own limit.
_SECONDS = 3600.0


def add_parser(subcommands: Subcommands) -> None:
    parser = subcommands.add_parser(
        "tune",
        help="measure which kernels are the fastest on this GPU, for servers to share",
        description="Check the kernels that can serve a model on this GPU, time those that are right at the "
        "lengths and requests that are served, and write a file that servers take with "
        '--additional-config \'{"diffusion": {"tuned": "FILE"}}\'. Nothing else should use the GPU.',
        epilog="Other options, behind all of these, are those of `vllm serve` that the servers have, such as "
        "--kv-cache-dtype fp8.",
        allow_abbrev=False,
    )
    parser.add_argument("model", type=values.model, help="what `vllm serve` takes")
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=values.integer(),
        metavar="N",
        help=f"tokens before a canvas ({' '.join(map(str, LENGTHS))})",
    )
    parser.add_argument(
        "--requests",
        nargs="+",
        type=values.integer(1, 256),
        metavar="N",
        help=f"requests that run at once ({' '.join(map(str, REQUESTS))}, and for the sampler the most)",
    )
    parser.add_argument(
        "--output", required=True, type=values.new_file, metavar="FILE", help="file to write"
    )
    parser.set_defaults(run=run, vllm_options=[])


def run(arguments: argparse.Namespace) -> int:
    quieten()
    if (lack := nvidia_lack()) is not None:
        return fail(
            f"Kernels are tuned on an NVIDIA GPU: {lack}. Run it where the model is served."
        )
    try:
        config = diffusion_config(arguments.model, arguments.vllm_options)
    except ValueError as error:
        return fail(one_line(error))
    return tune(config, arguments)


def diffusion_config(model: str, options: Sequence[str] = ()) -> VllmConfig:
    """Configure the model as a server with these options would.

    Raises:
        ValueError: If a server would refuse them, or none of our kernels would serve the model.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = parser.parse_args(["--model", model, *options])
    config = EngineArgs.from_cli_args(parsed).create_engine_config()
    if not hasattr(config.model_config, "canvas_spec"):
        raise ValueError(f"{model} is no diffusion model of this package's; name another.")
    return config


def tune(config: VllmConfig, arguments: argparse.Namespace) -> int:
    """Check, measure, choose and write; the exit status is 1 if nothing could be chosen or written."""
    from vllm import envs

    from vllm_diffusion.kernel_choice.process import CannotCheckError
    from vllm_diffusion.kernel_choice.tuned_file import TunedFor, tuned_json

    if envs.VLLM_BATCH_INVARIANT:
        return fail(
            "VLLM_BATCH_INVARIANT leaves nothing to tune; unset it, here and where it serves."
        )
    questions = served_questions(config, arguments.lengths, arguments.requests)
    try:
        answers, kernels = measured(questions)
    except CannotCheckError as error:
        return fail(f"No process could use the GPU ({error}); stop what else uses it.")
    for each in answers:
        say(each.line())
    if all(each.chosen is None for each in answers):
        return fail(
            "No kernel was found right on this GPU, so no file is written; see doctor --gpu."
        )
    figures = {each.subject: each.microseconds for each in answers}
    content = tuned_json(TunedFor.of(config), kernels, figures)
    try:
        arguments.output.write_text(content, encoding="utf-8")
    except OSError as error:
        # Minutes of a GPU are in it.
        print(content, end="")
        return fail(
            f"{arguments.output} cannot be written ({error.strerror}); it is printed instead."
        )
    say(f'Serve with --additional-config \'{{"diffusion": {{"tuned": "{arguments.output}"}}}}\'')
    return 0


def served_questions(
    config: VllmConfig, lengths: Sequence[int] | None, requests: Sequence[int] | None
) -> list[Question]:
    """Return what is to be decided for a configuration.

    Raises:
        UsageError: If a length is none of the model's.
    """
    from vllm_diffusion.kernel_choice.cases import Served
    from vllm_diffusion.kernel_choice.tuning import attention_questions, sampler_question
    from vllm_diffusion.startup.kernel_choices import DEFAULT_KERNELS

    served = Served.of(config, DEFAULT_KERNELS)
    longest = served.max_model_len
    if lengths is not None and max(lengths) > longest:
        raise UsageError(f"--lengths: {max(lengths)} is above the model's length of {longest}.")
    # The longest pass has four canvases of rows behind them.
    room = max(1, longest - 4 * served.step.spec.length)
    contexts = sorted({min(length, room) for length in lengths or LENGTHS})
    vocab = -(-config.model_config.get_vocab_size() // config.parallel_config.tensor_parallel_size)
    canvases = requests or sorted({*REQUESTS, served.step.slots})
    return [
        *attention_questions(served, contexts, requests or REQUESTS),
        sampler_question(served, vocab, canvases),
    ]


def measured(questions: Sequence[Question]) -> tuple[list[Answer], KernelChoices]:
    """Check the ways of all questions, then time those that are right, with a bar of progress.

    Raises:
        CannotCheckError: If no process can use the GPU.
    """
    from rich.console import Console
    from rich.progress import Progress

    from vllm_diffusion.kernel_choice.process import CheckProcess
    from vllm_diffusion.kernel_choice.tuning import (
        ROUNDS,
        TIMING_COMMAND,
        answer,
        with_right_ways,
    )
    from vllm_diffusion.startup.kernel_choices import DEFAULT_KERNELS

    answers, kernels = [], DEFAULT_KERNELS
    checking = CheckProcess("cuda:0", seconds=_SECONDS)
    timing = CheckProcess("cuda:0", seconds=_SECONDS, measures=True, command=TIMING_COMMAND)
    with Progress(console=Console(stderr=True)) as progress:

        def counted(process: CheckProcess, what: str, total: int) -> Check:
            task = progress.add_task(what, total=total)

            def check(case: KernelCase) -> Outcome:
                progress.advance(task)
                return process.check(case)

            return check

        with checking:
            number = sum(len(way.checks) for each in questions for way in each.candidates)
            check = counted(checking, "checking", number)
            right = [with_right_ways(question, check) for question in questions]
        with timing:
            timed = sum(len(way.timed) for each in right for way in each.candidates)
            clock = counted(timing, "measuring", ROUNDS * timed)
            for question in right:
                found, kernels = answer(question, clock, kernels)
                answers.append(found)
    return answers, kernels
