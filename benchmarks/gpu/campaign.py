"""Everything that only a GPU can tell, in the order of what matters, in as much time as there is.

    python benchmarks/gpu/campaign.py list python benchmarks/gpu/campaign.py run --minutes 9.5     #
    what has no result yet, in a call of ten minutes python benchmarks/gpu/campaign.py run --only
    sampler    # although it has python benchmarks/gpu/campaign.py report                # what is
    known by now python benchmarks/gpu/campaign.py report --write        # the same into
    gpu-figures.md

Experiments run one after another, each in a process of its own that is stopped at its limit. Rows
are on disk as they come, whatever ends an experiment or the campaign
(docs/develop/gpu-campaign.md).
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

# A script's folder is on the path, and so is that of what it shares with the other benchmarks.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import machine
import records
import report
import results
from bounded import run_bounded
from experiments import EXPERIMENTS, Experiment
from results import Origin, Result

LOG_CHARACTERS = 4000


@dataclass
class Campaign:
    """Experiments that write into one folder.

    Attributes:
        folder: Of the results.
        origin: Of all of them.
        environment: What experiments run with.
        deadline: By ``time.monotonic()``: nothing runs longer.
    """

    folder: Path
    origin: Origin
    environment: dict[str, str]
    deadline: float

    def lacks(self, experiment: Experiment) -> str | None:
        """Why an experiment cannot run now; ``None`` if it can."""
        memory_gib = self.origin.machine["memory_gib"]
        if memory_gib < experiment.memory_gib:
            return f"the GPU has {memory_gib} GiB, and this needs {experiment.memory_gib}"
        minutes = max(0.0, self.deadline - time.monotonic()) / 60
        if minutes < experiment.expected:
            return f"{minutes:.1f} minutes are left, and it takes some {experiment.expected}"
        return None

    def run(self, experiment: Experiment) -> Result:
        """Run an experiment to its end or its limit; its result is on disk, whatever becomes of
        it.
        """
        folder = self.folder.resolve()
        data = folder / f"{experiment.name}.jsonl"
        command = experiment.command(str(data), str(folder / experiment.name))
        begun = Result(
            experiment.name,
            "cut",
            "the campaign was ended",
            f"python benchmarks/{experiment.script}".replace("{out}", "out"),
            self.origin,
            datetime.now(UTC).isoformat(timespec="seconds"),
        )
        data.unlink(missing_ok=True)
        results.write(self.folder, begun)
        limit = min(60 * experiment.limit, self.deadline - time.monotonic())
        start = time.monotonic()
        with tempfile.TemporaryFile() as log:
            status = run_bounded(command, self.environment, machine.ROOT, limit, log)
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_CHARACTERS))
            tail = log.read().decode(errors="replace").replace(f"{machine.ROOT}/", "")
        state, reason = "done", ""
        if status is None:
            state, reason = "cut", f"stopped after {limit:.0f} seconds"
        elif status != 0:
            last = (tail.strip().splitlines() or ["it printed nothing"])[-1]
            state, reason = "failed", f"exit status {status}: {last[:300]}"
        seconds = round(time.monotonic() - start, 1)
        # What is done has said everything in its rows.
        log_end = "" if state == "done" else tail
        ended = replace(
            begun, state=state, reason=reason, seconds=seconds, rows=records.read(data), log=log_end
        )
        results.write(self.folder, ended)
        data.unlink(missing_ok=True)
        return ended


def run(options: argparse.Namespace) -> int:
    """Run the campaign; 0 if nothing failed."""
    deadline = time.monotonic() + 60 * options.minutes
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        environment = machine.environment(Path(scratch))
        facts = machine.described(environment)
        commit = options.commit or machine.commit()
        if commit is None:
            raise ValueError(
                "No commit says what is measured here: there is no history, or files were changed. "
                "Name it with --commit."
            )
        origin = Origin(commit, facts)
        chip = "-".join(facts["gpu"].lower().replace("/", " ").split())
        folder = options.out or results.RESULTS / f"{commit[:12]}-{chip}"
        folder.mkdir(parents=True, exist_ok=True)
        known = results.read(folder)
        for other in known.values():
            if str(other.origin) != str(origin):
                raise ValueError(
                    f"{folder} holds results of another run ({other.origin}), and this is {origin}. "
                    "Name another folder with --out."
                )
        print(f"{origin}, results in {folder}", flush=True)
        campaign = Campaign(folder, origin, environment, deadline)
        chosen = options.only or [e.name for e in EXPERIMENTS if e.name not in known]
        for experiment in EXPERIMENTS:
            if experiment.name not in chosen:
                continue
            if (reason := campaign.lacks(experiment)) is not None:
                print(f"{experiment.name:22} not run   {reason}", flush=True)
                continue
            print(f"{experiment.name}: {experiment.answers} ...", file=sys.stderr, flush=True)
            result = campaign.run(experiment)
            failed |= result.state == "failed"
            became = f"{result.state:9} {result.seconds:6.1f} s  {result.reason}"
            print(f"{experiment.name:22} {became}", flush=True)
            known[experiment.name] = result
            for line in report.decision(experiment, known):
                print(f"  {line}", flush=True)
    print(f"python benchmarks/gpu/campaign.py report {folder}")
    return int(failed)


def list_experiments(_: argparse.Namespace) -> int:
    """Print every experiment with its minutes."""
    for experiment in EXPERIMENTS:
        minutes = f"{experiment.expected:4} min, at most {experiment.limit}"
        print(f"{experiment.name:22} {minutes:20} {experiment.answers}")
        print(f"{'':22} {'decides':20} {experiment.decides}")
    return 0


def main(argv: list[str] | None = None) -> int:
    # Whoever ends the campaign ends its experiment with it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(dest="what", required=True)
    names = [experiment.name for experiment in EXPERIMENTS]
    runs = commands.add_parser("run", help="run what has no result yet")
    runs.add_argument("--only", nargs="+", choices=names, help="these, although they have results")
    runs.add_argument("--minutes", type=float, default=70, help="for this command (%(default)s)")
    runs.add_argument("--out", type=Path, help="folder of the results; one is named by default")
    runs.add_argument("--commit", help="of this checkout, where it has no history or was changed")
    runs.set_defaults(act=run)
    reports = commands.add_parser("report", help="a table of what is known")
    reports.add_argument("folders", nargs="*", type=Path, help="all that are kept by default")
    reports.add_argument("--write", action="store_true", help="into gpu-figures.md")
    reports.set_defaults(act=report.run)
    commands.add_parser("list", help="the experiments").set_defaults(act=list_experiments)
    options = parser.parse_args(argv)
    try:
        status: int = options.act(options)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept", file=sys.stderr)
        return 130
    return status


if __name__ == "__main__":
    sys.exit(main())
