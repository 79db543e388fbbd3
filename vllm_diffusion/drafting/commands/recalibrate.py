"""``vllm-diffusion calibrate online``: drafts trained on a server's requests, while it has none."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from vllm_diffusion.cli import values
from vllm_diffusion.cli.checkpoint import end_with_signals
from vllm_diffusion.cli.client import ServerError, read_metrics
from vllm_diffusion.cli.console import CommandError, say
from vllm_diffusion.cli.server import process_tree
from vllm_diffusion.drafting.accepted import MARGIN
from vllm_diffusion.drafting.commands.swap_draft import add_server, ask_draft
from vllm_diffusion.drafting.commands.train_draft import COMPARISON, add_training
from vllm_diffusion.drafting.recording import read_recording

if TYPE_CHECKING:
    from vllm_diffusion.cli.checkpoint import Subcommands

_GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_POLL_SECONDS, _HALT_SECONDS = 1.0, 0.5
_TRAIN = (sys.executable, "-m", "vllm_diffusion.cli.main", "calibrate", "train")
# Time without a request after which a round may begin.
_IDLE_SECONDS = 30.0


class IdleWorkError(Exception):
    """The training failed or reached a cap. The message is for the user."""


def run_while_idle(
    command: Sequence[str], is_busy: Callable[[], bool], seconds: float, max_bytes: int
) -> float:
    """Run a training to its end, and halt it while the server is busy.

    A signal halts all processes of the command; they keep their memory.

    Args:
        command: Program and arguments.
        is_busy: Returns true while the server has work; called twice a second.
        seconds: Limit for the time; that in which the command is halted does not count.
        max_bytes: Limit for the memory of all of its processes.

    Returns:
        Seconds that it ran.

    Raises:
        IdleWorkError: If it fails, or exceeds a limit: it is killed then.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            # Lowest priority: a process takes only the CPU time that others leave.
            ["nice", "-n", "19", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A group of its own, for signals to all of its processes.
            start_new_session=True,
        )
        try:
            spent = _watch(process, is_busy, seconds, max_bytes)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    if process.returncode:
        last = next((line for line in reversed(lines) if line.strip()), "")
        raise IdleWorkError(f"training failed: {last}")
    return spent


def _watch(
    process: subprocess.Popen[bytes], is_busy: Callable[[], bool], seconds: float, max_bytes: int
) -> float:
    is_halted = False
    spent, then = 0.0, time.monotonic()
    while process.poll() is None:
        time.sleep(_HALT_SECONDS)
        now = time.monotonic()
        if not is_halted:
            spent += now - then
        then = now
        if spent >= seconds:
            raise IdleWorkError(f"training reached the cap of {seconds / 60:g} minutes.")
        if _bytes_of(process.pid) > max_bytes:
            raise IdleWorkError(f"training reached the cap of {max_bytes / 2**30:g} GiB of memory.")
        if is_busy() != is_halted:
            is_halted = not is_halted
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGSTOP if is_halted else signal.SIGCONT)
            say("training: halted, the server has work" if is_halted else "training: goes on")
    return spent


def _bytes_of(pid: int) -> int:
    """Return the resident memory of a process and its descendants; shared pages count for each."""
    total = 0
    for process in process_tree(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


def add_parser(steps: Subcommands) -> None:
    parser = steps.add_parser(
        "online",
        help="train drafts in a server's idle time, and swap them in if they are better",
        description="Wait until a server is idle, train on its recording, compare "
        f"the new draft with the served one on held-out answers, and swap it in if it gives at "
        f"least {100 * MARGIN:.0f} percent more tokens a verification. Training pauses while the server has work. "
        "Ctrl-C ends it.",
        epilog="Other options go to vLLM for the extraction, such as --max-model-len 4096.",
        allow_abbrev=False,
    )
    add_server(parser)
    parser.add_argument(
        "--target", type=values.model, required=True, help="the model that the server serves"
    )
    parser.add_argument(
        "--recording", type=values.path, required=True, help="folder to which the server records"
    )
    parser.add_argument(
        "--drafts", type=values.folder, required=True, help="folder that keeps new drafts"
    )
    amount = values.number(0.001)
    for option, read, default, meaning in (
        ("--minutes", amount, 60.0, "longest time of a round"),
        ("--gib", amount, 16.0, "most memory of training, in GiB"),
        ("--exchanges", values.integer(), 200, "new exchanges that begin a round"),
    ):
        values.add_number(parser, option, read, meaning, default, "X")
    add_training(parser)
    parser.set_defaults(run=run, vllm_options=[])


def run(arguments: argparse.Namespace) -> int:
    try:
        read_recording(arguments.recording)
    except ValueError as error:
        raise values.UsageError(f"--recording: {error}") from None
    end_with_signals()
    _served(arguments)
    rounds = _Rounds(arguments)
    while True:
        rounds.wait()
        rounds.run()


def _served(arguments: argparse.Namespace) -> Path:
    """Return the folder of the draft that is served.

    Raises:
        CommandError: If it is none on this machine.
    """
    folder = Path(ask_draft(arguments)["model"])
    if not (folder / "config.json").is_file():
        raise CommandError(
            f"The server's draft {folder} is not a folder on this machine, where training starts from it; "
            "start the server with the path of its draft."
        )
    return folder.absolute()


@dataclass
class _Rounds:
    """Rounds of training, comparison and swap, one after the other.

    Attributes:
        arguments: Of the command.
        until: When the newest exchange ended that a round has seen.
    """

    arguments: argparse.Namespace
    until: float = 0.0
    _times: list[float] = field(default_factory=list)
    _sizes: list[tuple[str, int]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until the server is idle and enough was recorded."""
        arguments = self.arguments
        idle_since = time.monotonic()
        reported = ""
        while True:
            is_busy = _is_busy(arguments.url)
            if is_busy:
                idle_since = time.monotonic()
            if is_busy or time.monotonic() - idle_since < _IDLE_SECONDS:
                waits = "the server has work"
            elif self._num_new() < arguments.exchanges:
                waits = f"fewer than {arguments.exchanges} new exchanges are recorded"
            else:
                self.until = self._times[-1]
                return
            if waits != reported:
                reported = waits
                say(f"Waiting: {waits}.")
            time.sleep(_POLL_SECONDS)

    def _num_new(self) -> int:
        """Exchanges that no round has seen; read again where the files are others."""
        recording = self.arguments.recording
        sizes = []
        for file in sorted(recording.glob("*")) if recording.is_dir() else [recording]:
            # The oldest file of a ring goes while it is written.
            with contextlib.suppress(FileNotFoundError):
                sizes.append((file.name, file.stat().st_size))
        if sizes != self._sizes:
            self._sizes = sizes
            try:
                self._times = [each.time for each in read_recording(recording).exchanges]
            except ValueError:
                # It was cleared meanwhile.
                self._times = []
        return sum(at > self.until for at in self._times)

    def run(self) -> None:
        """Train, compare, swap. What fails ends the round, and the served draft stays."""
        arguments = self.arguments
        old = _served(arguments)
        arguments.drafts.mkdir(parents=True, exist_ok=True)
        new = arguments.drafts.absolute() / datetime.now().strftime("%Y-%m-%d-%H%M%S")
        # All that a command leaves when it is killed is in this folder.
        with tempfile.TemporaryDirectory(dir=arguments.drafts) as folder:
            trained = Path(folder) / "draft"
            command = [*_TRAIN, arguments.target, str(arguments.recording), "--from", str(old)]
            command += ["--out", str(trained), "--minutes", str(arguments.minutes)]
            command += ["--device", arguments.device, "--disk-gib", str(arguments.disk_gib)]
            try:
                spent = run_while_idle(
                    [*command, *arguments.vllm_options],
                    lambda: _is_busy(arguments.url),
                    arguments.minutes * 60,
                    int(arguments.gib * 2**30),
                )
                if not (trained / COMPARISON).is_file():
                    raise IdleWorkError("no recorded answers are held out to compare drafts on.")
                figures = json.loads((trained / COMPARISON).read_text(encoding="utf-8"))
            except IdleWorkError as error:
                say(f"The round ends, and {old} is served on: {error}")
                return
            say(
                f"On held-out answers: {figures['new']:.2f} tokens a verification, and {figures['old']:.2f} of the "
                f"served draft; {spent / 60:.1f} minutes."
            )
            if not figures["is_better"]:
                say(f"That is not {100 * MARGIN:.0f} % more: {old} is served on.")
                return
            trained.rename(new)
        try:
            print(f"{ask_draft(arguments, new)['model']} is served.", flush=True)
        except ServerError as error:
            say(f"{new} was not taken: {error}")


def _is_busy(url: str) -> bool:
    """Return whether a server has requests, by its own gauges.

    Raises:
        ServerError: If it is not there any more.
    """
    return any(sample.value for sample in read_metrics(url) if sample.name in _GAUGES)
