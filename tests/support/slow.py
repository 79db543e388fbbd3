"""Run the slow tests one file after another, and go on where the last run ended.

    python -m tests.support.slow                # runs what has not passed in this tree
    python -m tests.support.slow --list         # prints it
    python -m tests.support.slow --only drafts  # tests whose names hold this
    python -m tests.support.slow --minutes 30   # begins no file later than that

A test's outcome is written down when it ends, so that stopping loses one test at most. It counts
for the tree of the package and the tests that it ran in: a commit to either makes every test run
again. The outcomes are in ``.pytest_cache/slow.json``.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / ".pytest_cache" / "slow.json"
FOLDERS = ("vllm_diffusion", "attention_kernels", "tests")
Outcomes = dict[str, dict[str, Any]]
_ended: dict[str, tuple[str, float]] = {}


@cache
def read_tree() -> str:
    """Return a key of what is committed of the package and the tests, as it was at the first call.

    Raises:
        SystemExit: If files there are not committed, so that no key tells what a test ran with.
    """
    changed = _git("status", "--porcelain", "--", *FOLDERS)
    if changed:
        raise SystemExit(f"commit first: what passes counts for a commit\n{changed}")
    trees = _git("rev-parse", *(f"HEAD:{folder}" for folder in FOLDERS)).split()
    return "-".join(tree[:8] for tree in trees)


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def read_outcomes() -> Outcomes:
    """Return by each test's name its tree, its outcome and its seconds."""
    return json.loads(STATE.read_text(encoding="utf-8")) if STATE.is_file() else {}


def pytest_sessionstart() -> None:
    """Read the tree before any test runs."""
    read_tree()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a test's outcome once it is torn down. This file is a plugin of the pytest below."""
    outcome, seconds = _ended.get(report.nodeid, ("passed", 0.0))
    if outcome == "passed":
        outcome = report.outcome
    _ended[report.nodeid] = outcome, seconds + report.duration
    if report.when == "teardown":
        outcome, seconds = _ended.pop(report.nodeid)
        outcomes = read_outcomes()
        outcomes[report.nodeid] = {"tree": read_tree(), "outcome": outcome, "seconds": seconds}
        STATE.parent.mkdir(exist_ok=True)
        STATE.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "slow", "-q", *arguments]


def slow_tests() -> list[str]:
    """Return the names of all slow tests, in the order of their files."""
    found = subprocess.run(_pytest("--collect-only"), cwd=ROOT, capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(found.stdout + found.stderr)
    return [line for line in found.stdout.splitlines() if line.startswith("tests/")]


def waiting(tests: list[str], outcomes: Outcomes, tree: str) -> list[str]:
    """Return the tests that have neither passed in this tree nor been skipped for the machine."""
    done = {
        name
        for name, last in outcomes.items()
        if last["tree"] == tree and last["outcome"] != "failed"
    }
    return [name for name in tests if name not in done]


def print_state(tests: list[str], tree: str) -> list[str]:
    """Print what became of the tests, with those that have not passed, and return these."""
    outcomes = read_outcomes()
    left = waiting(tests, outcomes, tree)
    here = {name: outcomes[name] for name in tests if outcomes.get(name, {}).get("tree") == tree}
    for name in tests:
        if name not in here:
            before = outcomes.get(name)
            print(
                f"not run  {name}" + (f" ({before['outcome']} in another tree)" if before else "")
            )
        elif here[name]["outcome"] != "passed":
            print(f"{here[name]['outcome']:8} {name} ({here[name]['seconds']:.0f} s)")
    counts = Counter(last["outcome"] for last in here.values()) | Counter(
        {"not run": len(tests) - len(here)}
    )
    seconds = sum(last["seconds"] for last in here.values())
    print(f"{len(tests)} slow tests in tree {tree}, {seconds:.0f} s so far: {dict(counts)}")
    return left


def main(argv: list[str] | None = None) -> int:
    """Exit with 0 once every chosen test has passed or been skipped in this tree."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.slow", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--list", action="store_true", help="print what has not passed, and run nothing"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="tests whose names hold this")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no file later than that"
    )
    arguments = parser.parse_args(argv)
    tree, begun = read_tree(), time.monotonic()
    tests = [name for name in slow_tests() if arguments.only in name]
    left = print_state(tests, tree)
    if arguments.list:
        return bool(left)
    for _, names in groupby(left, lambda name: name.partition("::")[0]):
        if time.monotonic() - begun < 60 * arguments.minutes:
            subprocess.run(_pytest("-p", "tests.support.slow", *names), cwd=ROOT)
    return bool(print_state(tests, tree))


if __name__ == "__main__":
    sys.exit(main())
