"""Counts that must not grow: what they were is in ``tests/baselines.json``.

A count above its baseline fails; so does one that has none, and a baseline that nothing counts any
more. To record what a change makes of them, better or for a reason worse:

    UPDATE_BASELINES=1 pytest tests/kernels tests/unit/benchmarks tests/null_gpu
    tests/integration/test_row_counts.py \\
        tests/integration/test_pass_overhead.py -k "ahead_of_time or baselines or engines or
        row_counts"
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

PATH = Path(__file__).resolve().parents[2] / "baselines.json"
Counts = Mapping[str, Mapping[str, float]]


def check(section: str, measured: Counts, *, slack: float = 1.0) -> None:
    """Compare with what a section of the file holds.

    Args:
        section: Its name.
        measured: By what was counted, its numbers; the smaller the better.
        slack: How many times its baseline a number may be; above 1 for times.

    Raises:
        AssertionError: If one is larger, missing in the file, or only there.
    """
    if os.environ.get("UPDATE_BASELINES") == "1":
        _record(section, measured)
    known: Counts = json.loads(PATH.read_text(encoding="utf-8")).get(section, {})
    remedy = f"see {Path(__file__).name} for how to record it"
    assert sorted(known) == sorted(measured), f"{section}: other rows than in {PATH.name}; {remedy}"
    for what, numbers in measured.items():
        assert sorted(numbers) == sorted(known[what]), f"{section}, {what}: other columns; {remedy}"
        grown = [
            f"{name} is {number}, was {known[what][name]}"
            for name, number in numbers.items()
            if number > slack * known[what][name]
        ]
        assert not grown, f"{section}, {what}: {'; '.join(grown)}; {remedy}"


def _record(section: str, measured: Counts) -> None:
    """Replace a section; a row of the file is a line."""
    sections = json.loads(PATH.read_text(encoding="utf-8")) if PATH.is_file() else {}
    sections[section] = measured
    blocks = []
    for name in sorted(sections):
        rows = sections[name]
        lines = [f"  {json.dumps(what)}: {json.dumps(rows[what])}" for what in sorted(rows)]
        blocks.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    PATH.write_text("{\n" + ",\n".join(blocks) + "\n}\n", encoding="utf-8")
