"""``vllm-diffusion calibrate train``: a draft trained on recorded traffic."""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.cli import values
from vllm_diffusion.cli.console import add_verbose, fail, one_line, quieten, say
from vllm_diffusion.drafting.accepted import MARGIN
from vllm_diffusion.drafting.calibration.train_settings import TrainSettings
from vllm_diffusion.drafting.commands.contenders import read_config
from vllm_diffusion.drafting.recording import read_recording

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands
    from vllm_diffusion.drafting.calibration.train import Progress

# File of a trained draft: tokens a verification of it and of the one that it began with, and
# whether it is better.
COMPARISON = "comparison.json"
# Share of the time that is left after the extraction; the drafts are compared in the rest.
_SHARE_OF_TRAINING = 0.7
_TICK_SECONDS, _LONGEST_TICK = 0.5, 5.0


class RunningTime:
    """Clock of the time that this process runs: it stands while `calibrate online` halts the
    process.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        threading.Thread(target=self._tick, daemon=True).start()

    def _tick(self) -> None:
        then = time.monotonic()
        while True:
            time.sleep(_TICK_SECONDS)
            now = time.monotonic()
            # A tick takes longer than that only where the process was halted.
            self.seconds += min(now - then, _LONGEST_TICK)
            then = now


def add_parser(steps: Subcommands) -> None:
    parser = steps.add_parser(
        "train",
        help="train a draft on recorded traffic",
        description="Run the target over recorded traffic, the newest first, train a draft on its hidden states, "
        "beginning with another draft's weights, and compare both on held-out answers. Nothing is saved until all of it "
        "is complete.",
        epilog="Other options go to vLLM for the target, such as --tensor-parallel-size 2.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "target", type=values.model, help="the model that answered, a folder or a repository"
    )
    parser.add_argument(
        "recording", type=values.path, help="a recording's folder, or a file of JSON lines"
    )
    parser.add_argument(
        "--from", dest="first", type=values.draft, required=True, help="draft to start from"
    )
    parser.add_argument("--out", type=values.folder, required=True, help="new folder for the draft")
    count, amount = values.integer(), float
    values.add_number(parser, "--steps", count, "steps of the optimizer", 2000)
    meaning = "time limit for all of it; steps that are left are dropped"
    values.add_number(parser, "--minutes", amount, meaning, metavar="X")
    meaning, default = "highest learning rate", TrainSettings.learning_rate
    values.add_number(parser, "--learning-rate", amount, meaning, default, "X")
    values.add_number(parser, "--batch-size", count, "samples of a step", TrainSettings.batch_size)
    values.add_number(parser, "--max-length", values.integer(2), "longest sample, in tokens", 4096)
    add_training(parser)
    add_verbose(parser)
    parser.set_defaults(run=run, vllm_options=[])


def add_training(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where a draft is trained, and on how much."""
    meaning = "disk space for hidden states, which are deleted afterwards"
    values.add_number(parser, "--disk-gib", values.number(0.001), meaning, 4.0, "X")
    parser.add_argument(
        "--device",
        default="cpu",
        help="device of training: cpu, cuda or cuda:N (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    running = RunningTime()
    try:
        names = ("steps", "minutes", "learning_rate", "batch_size")
        settings = TrainSettings(**{name: getattr(arguments, name) for name in names})
    except ValueError as error:
        raise values.UsageError(f"--{str(error).replace('_', '-')}") from None
    out = arguments.out
    if out.exists():
        raise values.UsageError(f"--out: {out} already exists; name a new folder.")
    try:
        exchanges = read_recording(arguments.recording).exchanges
    except ValueError as error:
        raise values.UsageError(f"argument recording: {error}") from None
    layers = _layers_of(arguments.first)
    out.parent.mkdir(parents=True, exist_ok=True)
    if not arguments.verbose:
        quieten()
    from vllm_diffusion.drafting.calibration.extract import extract

    try:
        _check_device(arguments.device)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
            samples = Path(folder) / "samples"
            # Its engine needs a process without torch's threads, and what it has loaded goes with
            # it.
            spawn = multiprocessing.get_context("spawn")
            quiet = None if arguments.verbose else quieten
            with ProcessPoolExecutor(1, spawn, initializer=quiet) as pool:
                pool.submit(
                    extract,
                    [arguments.target, *arguments.vllm_options],
                    exchanges,
                    layers,
                    samples,
                    int(arguments.disk_gib * 2**30),
                    arguments.max_length,
                ).result()
            _train(arguments, settings, samples, running)
    except ValueError as error:
        return fail(one_line(error))
    except BrokenProcessPool:
        return fail("The process that extracts hidden states was killed; is there enough memory?")
    print(f"The draft is in {out}; training.svg there shows its training.")
    return 0


def _layers_of(draft: Path) -> list[int]:
    """Read the ids of the target's layers that a draft reads.

    Raises:
        UsageError: If its ``config.json`` does not name them.
    """
    layers = read_config("--from", str(draft)).get("dflash_config", {}).get("target_layer_ids")
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise values.UsageError(
            f"--from: {draft / 'config.json'} has no dflash_config.target_layer_ids; name the folder of a "
            "DFlash draft."
        )
    return layers


def _check_device(name: str) -> None:
    """Check that a device is there, before anything takes time.

    Raises:
        ValueError: If it is not.
    """
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name}: {str(error).splitlines()[0]}") from None
    # Nothing is put there: the memory is the extraction's first.
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: torch finds no such GPU; set it to cpu.")


def _train(
    arguments: argparse.Namespace, settings: TrainSettings, samples: Path, running: RunningTime
) -> None:
    """Train on a folder of samples, save the draft, and say whether it is better than the first
    one.

    Raises:
        ValueError: If no time is left to train, and as
            :func:`~vllm_diffusion.drafting.calibration.calibrate.calibrate`.
    """
    from vllm_diffusion.drafting.calibration import calibrate

    out, device = arguments.out, arguments.device
    ends = calibrate.load_ends(arguments.target)
    draft = calibrate.load_first_draft(arguments.first)
    if settings.minutes is not None:
        left = settings.minutes - running.seconds / 60
        if left <= 0:
            raise ValueError(
                f"--minutes={settings.minutes:g}: the extraction used all of them; raise it."
            )
        settings = dataclasses.replace(settings, minutes=left * _SHARE_OF_TRAINING)
    calibrate.calibrate(
        samples,
        ends,
        draft,
        out,
        settings,
        device=device,
        report=partial(_report, running.seconds, running),
        clock=lambda: running.seconds,
    )
    new, old = calibrate.compare(samples, ends, out, arguments.first, device)
    if not new.number:
        say("No answers were held out, so the drafts were not compared.")
        return
    is_better = new.is_better_than(old)
    figures = {"new": new.tokens, "old": old.tokens, "is_better": is_better}
    (out / COMPARISON).write_text(json.dumps(figures) + "\n", encoding="utf-8")
    verdict = "better" if is_better else f"not better by {100 * MARGIN:.0f} %"
    say(
        f"On held-out answers: {new.tokens:.2f} tokens a verification, and {old.tokens:.2f} of the first draft. "
        f"The new one is {verdict}."
    )


def _report(start: float, running: RunningTime, progress: Progress) -> None:
    line = f"step {progress.step}, {(running.seconds - start) / 60:.1f} min: {progress.loss:.3f} nats a masked token"
    if progress.acceptance_by_position:
        shares = " ".join(f"{share:.2f}" for share in progress.acceptance_by_position)
        line += (
            f"; held out: {progress.accepted:.2f} of {len(progress.acceptance_by_position)} "
            f"accepted, by position {shares}"
        )
    say(line)
