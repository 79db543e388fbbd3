"""Everything that only a GPU can tell, in an hour of one.

    python benchmarks/gpu/campaign.py run                   # all of it, on this machine's GPU
    python benchmarks/gpu/campaign.py run --toy             # a rehearsal on the CPU
    python benchmarks/gpu/campaign.py report                # what is known by now
    python benchmarks/gpu/campaign.py report --write        # the same into gpu-figures.md

Experiments run one after another, each in a process of its own that is stopped at its limit, and
each leaves its result on disk. The same command goes on where an interrupted one stopped. What
cannot run here is listed with the reason, and what breaks does not keep the next one from running
(docs/develop/gpu-campaign.md).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

# A script's folder is on the path, and so is that of what it shares with the other benchmarks.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import machine
import records
import report
import results
from experiments import ALL_MINUTES, EXPERIMENTS, Experiment
from results import Origin, Result

LOG_CHARACTERS = 4000
# Between asking an experiment to stop and stopping it.
GRACE_SECONDS = 15
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Campaign:
    """Experiments that write into one folder.

    Attributes:
        folder: Of the results.
        origin: Of this run's.
        environment: What experiments run with.
        deadline: By ``time.monotonic()``: nothing runs longer.
        again: Names of experiments that run although their results are there.
    """

    folder: Path
    origin: Origin
    environment: dict[str, str]
    deadline: float
    again: Sequence[str] = ()

    def run(self, experiments: Sequence[Experiment]) -> list[Result]:
        """Run what has no result yet; one result for each experiment."""
        known = results.read(self.folder)
        found = []
        for experiment in experiments:
            before = known.get(experiment.name)
            if before and before.state in results.SETTLED and experiment.name not in self.again:
                say(experiment, before, "from before")
                found.append(before)
                continue
            result = self._run(experiment)
            results.write(self.folder, result)
            say(experiment, result)
            found.append(result)
        return found

    def _run(self, experiment: Experiment) -> Result:
        toy = self.origin.toy
        data, out = self.folder / f"{experiment.name}.jsonl", self.folder / experiment.name
        words = experiment.command(toy, str(data.resolve()), str(out.resolve()))
        typed = shlex.join(experiment.command(toy, "rows.jsonl", "out"))
        begun = Result(
            experiment.name,
            "running",
            "interrupted",
            typed.replace(sys.executable, "python"),
            self.origin,
            datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if (reason := experiment.lacks(self.origin.machine, toy)) is not None:
            return replace(begun, state="not run", reason=reason)
        left = self.deadline - time.monotonic()
        if left < 60 * min(experiment.expected, experiment.limit):
            reason = (
                f"{max(left, 0) / 60:.1f} minutes were left of --minutes, and it is expected to "
                f"take {experiment.expected}; run the same command again"
            )
            return replace(begun, state="not run", reason=reason)

        results.write(self.folder, begun)
        out.mkdir(exist_ok=True)
        data.unlink(missing_ok=True)
        print(f"{experiment.name}: {experiment.answers} ...", file=sys.stderr, flush=True)
        limit = min(60 * experiment.limit, left)
        start = time.monotonic()
        with tempfile.TemporaryFile() as log:
            status = run_bounded(words, self.environment, limit, log)
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_CHARACTERS))
            tail = log.read().decode(errors="replace").replace(f"{machine.ROOT}/", "")
        if not any(out.iterdir()):
            out.rmdir()
        ended = replace(
            begun,
            state="done",
            reason="",
            seconds=round(time.monotonic() - start, 1),
            rows=records.read(data),
            log=tail,
        )
        data.unlink(missing_ok=True)
        if status is None:
            state = "timed out" if limit >= 60 * experiment.limit else "cut"
            return replace(ended, state=state, reason=f"stopped after {limit:.0f} seconds")
        if status != 0:
            last = (tail.strip().splitlines() or ["it printed nothing"])[-1]
            return replace(ended, state="failed", reason=f"exit status {status}: {last[:300]}")
        return ended


def run_bounded(
    command: Sequence[str], environment: dict[str, str], seconds: float, log: object
) -> int | None:
    """Run a command to its end or to a limit, and leave nothing of it behind.

    Args:
        command: Its words.
        environment: All of it.
        seconds: The limit.
        log: A file for what it prints.

    Returns:
        Its exit status; ``None`` if it was stopped.
    """
    others = _children()
    # What it starts and leaves becomes this process's child, and not init's.
    _adopt_orphans(True)
    process = subprocess.Popen(
        command,
        cwd=machine.ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        # As from the keyboard, so that servers are stopped by those who started them.
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _end_orphans(others)
        _adopt_orphans(False)


def _adopt_orphans(adopts: bool) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0)


def _end_orphans(others: set[int]) -> None:
    """End every child of this process but ``others``, and theirs as they become its own."""
    while children := _children() - others:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def _children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == os.getpid():
            found.add(int(stat.parent.name))
    return found


def say(experiment: Experiment, result: Result, where: str = "") -> None:
    """One line of what became of an experiment."""
    words = [f"{experiment.name:22} {result.state:9} {result.seconds:6.1f} s", result.reason, where]
    print("  ".join(word for word in words if word), flush=True)


def run(options: argparse.Namespace) -> int:
    """Run the campaign; 0 if nothing failed."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        bare = machine.environment(None, options.toy, Path(scratch))
        try:
            facts = machine.described(bare)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 2
        if options.stub:
            facts["vllm"] = None
        commit = options.commit or machine.commit() or "unknown"
        origin = Origin(commit, machine.sources(), options.toy, facts)
        folder = options.out or results.RESULTS / origin.name
        try:
            results.check_origin(folder, origin)
        except ValueError as error:
            print(error, file=sys.stderr)
            return 2
        gpu = facts["gpu"] or f"no GPU ({facts['why_no_gpu']})"
        engine = f"vLLM {facts['vllm']}" if facts["vllm"] else "no vLLM, its stub in place"
        print(f"{gpu}; torch {facts['torch']}, triton {facts['triton']}, {engine}")
        print(f"commit {commit}, results in {folder}", flush=True)
        campaign = Campaign(
            folder,
            origin,
            machine.environment(facts, options.toy, Path(scratch)),
            start + 60 * options.minutes,
            options.again,
        )
        chosen = [e for e in EXPERIMENTS if not options.only or e.name in options.only]
        found = campaign.run(chosen)
    print(f"{time.monotonic() - start:.0f} s; python benchmarks/gpu/campaign.py report {folder}")
    return int(any(result.state in ("failed", "timed out") for result in found))


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> int:
    # Whoever ends the campaign ends its experiment with it.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    names = [experiment.name for experiment in EXPERIMENTS]
    runs = commands.add_parser("run", help="run what has no result yet")
    runs.add_argument("--toy", action="store_true", help="at toy size on the CPU: a rehearsal")
    runs.add_argument("--stub", action="store_true", help="as on a machine without vLLM")
    runs.add_argument("--only", nargs="+", choices=names, help="these experiments")
    runs.add_argument("--again", nargs="+", choices=names, default=[], help="although they ran")
    runs.add_argument(
        "--minutes", type=float, default=ALL_MINUTES, help="for this command (%(default)s)"
    )
    runs.add_argument("--out", type=Path, help="folder of the results; one is named by default")
    runs.add_argument("--commit", help="of this checkout, where it has no history")
    runs.set_defaults(act=run)
    reports = commands.add_parser("report", help="a table of what is known")
    reports.add_argument("folders", nargs="*", type=Path, help="all that are kept by default")
    reports.add_argument("--write", action="store_true", help="into gpu-figures.md")
    reports.set_defaults(act=report.run)
    listing = commands.add_parser("list", help="the experiments")
    listing.set_defaults(act=list_experiments)
    options = parser.parse_args(argv)
    try:
        status: int = options.act(options)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return status


def list_experiments(_: argparse.Namespace) -> int:
    """Print every experiment with its minutes."""
    for experiment in EXPERIMENTS:
        minutes = f"{experiment.expected:4} min, at most {experiment.limit}"
        print(f"{experiment.name:22} {minutes:20} {experiment.answers}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
