"""``vllm-diffusion calibrate train``: a draft trained on extracted hidden states."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from vllm_diffusion.cli import values
from vllm_diffusion.cli.console import fail, say
from vllm_diffusion.drafting.calibration.train_settings import TrainSettings

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands
    from vllm_diffusion.drafting.calibration.train import Progress

# Settings of a training that are options: what each means, and what reads it.
_SETTINGS: dict[str, tuple[str, Callable[[str], float]]] = {
    "batch_size": ("samples a step", int),
    "anchors": ("blocks of each sample", int),
    "learning_rate": ("at its highest", float),
    "revealed_share": (
        "share of the blocks of which some is revealed, for drafts of several passes",
        float,
    ),
    "report_every": ("steps between two lines of progress", int),
    "seed": ("of blocks, masks and random weights", values.seed),
}


def add_parser(steps: Subcommands) -> None:
    parser = steps.add_parser(
        "train",
        help="train a draft on extracted hidden states",
        description="Train a draft, from another one's weights or from random ones, on what `calibrate "
        "extract` wrote. Nothing is saved until it is complete.",
    )
    parser.add_argument("samples", type=values.samples, help="a folder of `calibrate extract`")
    parser.add_argument(
        "--out", type=values.folder, required=True, help="a new folder, for the draft"
    )
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--from", dest="first", type=values.draft, help="a draft to start from")
    meaning = "start from random weights, with so many layers"
    values.add_number(start, "--layers", values.integer(), meaning)
    meaning = "of a new draft: an anchor and masks"
    values.add_number(parser, "--block-size", values.integer(2), meaning)
    meaning = "of a new draft: a token that no text has"
    values.add_number(parser, "--mask-token-id", values.integer(0), meaning, metavar="ID")
    parser.add_argument(
        "--target",
        type=values.model,
        help="default: the one that the samples were extracted from",
    )
    values.add_number(parser, "--steps", int, "of the optimizer", 2000)
    meaning = "end then though steps are left"
    values.add_number(parser, "--minutes", float, meaning, metavar="X")
    for name, (meaning, read) in _SETTINGS.items():
        default = getattr(TrainSettings, name)
        metavar = "N" if isinstance(default, int) else "X"
        option = "--" + name.replace("_", "-")
        values.add_number(parser, option, read, meaning, default, metavar)
    add_device(parser)
    parser.set_defaults(run=run)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses where a draft is trained."""
    parser.add_argument(
        "--device",
        default="cpu",
        help="of training: cpu, cuda or cuda:N (%(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    is_new = arguments.first is None
    for name in ("block_size", "mask_token_id"):
        option = "--" + name.replace("_", "-")
        if is_new and getattr(arguments, name) is None:
            raise values.UsageError(
                f"{option} is needed for a new draft; give it, or start --from one."
            )
        if not is_new and getattr(arguments, name) is not None:
            raise values.UsageError(
                f"{option} is of a new draft, and --from has its own; leave it out."
            )
    try:
        names = ("steps", "minutes", *_SETTINGS)
        settings = TrainSettings(**{name: getattr(arguments, name) for name in names})
    except ValueError as error:
        raise values.UsageError(f"--{str(error).replace('_', '-')}") from None
    try:
        import torch

        from vllm_diffusion.drafting.calibration import calibrate
        from vllm_diffusion.drafting.calibration.samples import read_extraction
        from vllm_diffusion.drafting.reference_draft import ReferenceDraft, draft_config

        try:
            torch.empty(1, device=arguments.device)
        except (RuntimeError, AssertionError) as error:
            # Of a torch without CUDA, the latter.
            raise ValueError(f"--device {arguments.device}: {str(error).splitlines()[0]}") from None
        extraction = read_extraction(arguments.samples)
        draft = None if is_new else calibrate.load_first_draft(arguments.first)
        ends = calibrate.load_ends(arguments.target or extraction.target)
        if draft is None:
            torch.manual_seed(settings.seed)
            draft = ReferenceDraft(
                draft_config(
                    ends.config,
                    num_layers=arguments.layers,
                    block_size=arguments.block_size,
                    mask_token_id=arguments.mask_token_id,
                    target_layer_ids=extraction.target_layer_ids,
                )
            )
        calibrate.calibrate(
            arguments.samples,
            ends,
            draft,
            arguments.out,
            settings,
            device=arguments.device,
            report=partial(_report, time.monotonic()),
        )
    except ValueError as error:
        return fail(str(error))
    print(f"The draft is in {arguments.out}, a picture of its training in training.svg there.")
    return 0


def _report(start: float, progress: Progress) -> None:
    line = f"step {progress.step}, {(time.monotonic() - start) / 60:.1f} min: {progress.loss:.3f} nats a masked token"
    if progress.acceptance_by_position:
        shares = " ".join(f"{share:.2f}" for share in progress.acceptance_by_position)
        line += (
            f"; held out: {progress.accepted:.2f} of {len(progress.acceptance_by_position)} "
            f"accepted, by position {shares}"
        )
    say(line)
