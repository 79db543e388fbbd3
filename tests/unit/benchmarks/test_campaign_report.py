"""What the campaign's report makes of results, and where it writes it."""

from __future__ import annotations

from typing import Any

import records
import report
import results
from figures import FIGURES
from results import Found, Origin, Result

MACHINE = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.14", "triton": "3.8"}
H200 = Origin("a" * 40, MACHINE | {"vllm": "0.33"})


def results_of(origin: Origin = H200, state: str = "done", **rows: list[dict[str, Any]]) -> Found:
    """By experiment, with a dash for each underscore."""
    names = {name.replace("_", "-"): some for name, some in rows.items()}
    return {
        name: Result(name, state, "why", "python x", origin, "2026-12-01", 3.0, some)
        for name, some in names.items()
    }


def serving(side: str, speed: float, first: float) -> list[dict[str, Any]]:
    keys = {"table": "serving", "side": side, "ms_to_first": first, "ms_a_pass": None}
    return [keys | {"requests": n, "tokens_a_second": speed * n} for n in (1, 8)]


OURS, STOCK, TUNED = serving("ours", 150, 60), serving("stock", 100, 50), serving("tuned", 120, 70)
ATTENTION = {"table": "attention", "layer": "sliding", "requests": 1, "context": 1024}
# A sliding layer with the query's window, which is the one that stock has.
ATTENTION |= {"which": "stock-triton", "anchor": "query", "of_ours": 1.5}


def answered(table: str) -> int:
    return len(FIGURES) - table.count("| open |")


def test_document():
    """gpu-figures.md says what the kept results do, and no more."""
    page = records.DOCUMENT.read_text(encoding="utf-8")
    kept = sorted(path for path in results.RESULTS.iterdir() if path.is_dir())
    table = report.table(results.read_all(kept))
    assert records.with_part(page, "campaign", table) == page, (
        "run python benchmarks/gpu/campaign.py report --write"
    )


def test_figures_are_those_of_the_rows():
    """Against the better stock of each; a target is met or missed, and the rest is open."""
    kernels = [{"table": "kernels", "state": state} for state in ("right", "WRONG")]
    # What the probe finds of the device is no kernel.
    kernels.append({"table": "probe", "state": "cannot run"})
    found = results_of(
        serving_ours=OURS,
        serving_stock=STOCK,
        serving_tuned=TUNED,
        attention=[ATTENTION],
        kernels=kernels,
    )
    table = report.table([(H200, found)])
    assert "1; over the better stock | at least 1.1 | 1.13 | `serving-ours`" in table
    assert "| 1.25, met (NVIDIA H200, aaaaaaa) |" in table
    assert "| 1.25, **missed** (NVIDIA H200, aaaaaaa) |" in table
    assert table.count("| 1.2, **missed** (NVIDIA H200, aaaaaaa) |") == 2
    assert "stock-triton over ours | none | 5.89 | `attention` | 1.5" in table
    assert "| at most 0 |  | `kernels` | 1, **missed**" in table
    assert "| kernels | done | 3.0 | why | `python x` |" in table
    assert answered(table) == 9
