"""Checks of a device that run one after another, whatever the others found."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

# What it shares with the other benchmarks.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from data_file import DataFile
from timing import device_name

# Name -> what to do. What it returns is reported, and an AssertionError is a wrong result.
Checks = Mapping[str, Callable[[], str]]


def run_checks(table: str, doc: str | None, make: Callable[[bool], Checks]) -> int:
    """Run a script's checks and write a row for each; 1 if one of them is not right.

    Args:
        table: Table of the rows.
        doc: The script's docstring.
        make: Makes the checks, at toy size or not.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--toy", action="store_true", help="at toy size")
    parser.add_argument("--data", type=Path, help="file for the rows, as JSON lines")
    options = parser.parse_args()
    data = DataFile(options.data)
    print(device_name())
    checks = make(options.toy)
    wrong = []
    for name, check in checks.items():
        try:
            found, state = check(), "right"
        except AssertionError as error:
            found, state = " ".join(str(error).split())[:200], "WRONG"
        except Exception as error:  # one that cannot run says nothing of the others
            found, state = f"{type(error).__name__}: {str(error).strip()[:200]}", "cannot run"
        wrong += [name] * (state != "right")
        print(f"{name}: {state}, {found}", flush=True)
        data.add(table, what=name, state=state, found=found)
    if wrong:
        print(f"{len(wrong)} of {len(checks)} are not right: {'; '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))
