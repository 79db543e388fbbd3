"""What the campaign's report makes of results, and where it writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import report
import results
from results import Origin, Result

ROOT = Path(__file__).resolve().parents[3]
MACHINE = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.14",
    "triton": "3.8",
    "vllm": "0.33",
}
H200 = Origin("a" * 40, "s" * 16, False, MACHINE)


def result(name: str, *rows: dict[str, Any], origin: Origin = H200, state: str = "done") -> Result:
    return Result(
        name,
        state,
        "" if state == "done" else "why",
        "python x",
        origin,
        "2026-12-01",
        3.0,
        list(rows),
    )


def serving(side: str, speed: float, first: float, origin: Origin = H200) -> Result:
    rows = [
        {
            "table": "serving",
            "side": side,
            "requests": requests,
            "tokens_a_second": speed * requests,
            "ms_to_first": first,
            "ms_a_pass": 6.0 if requests == 1 else None,
        }
        for requests in (1, 8)
    ]
    return result(f"serving-{side}", *rows, origin=origin)


def group(*found: Result) -> tuple[Origin, dict[str, Result]]:
    return found[0].origin, {one.experiment: one for one in found}


@pytest.mark.parametrize("name", report.DOCUMENTS)
def test_documents(name):
    """RESULTS.md and docs/operate/what-was-run.md say what the kept results do, and no more."""
    page = (ROOT / name).read_text(encoding="utf-8")
    groups = results.read_all(report.kept())
    assert report.with_tables(name, page, groups) == page, (
        "run python benchmarks/gpu/campaign.py report --write"
    )


def test_without_results_everything_is_open():
    told = report.open_figures([])
    assert told.count("| open |") == len(report.FIGURES)
    assert report.where_it_ran([]).count("| not yet |") == len(report.PLACES)


def test_figures_are_those_of_the_rows():
    """Against the better stock of each; a target is met or missed."""
    found = group(serving("ours", 150, 60), serving("stock", 100, 50), serving("tuned", 120, 70))
    told = report.open_figures([found])
    assert "over the better stock | at least 1.1 | `serving-ours`" in told
    assert "| 1.25, met (NVIDIA H200, aaaaaaa) |" in told
    assert "at 8 requests, over the better stock | at least 2.0" in told
    assert "| 1.25, **missed** (NVIDIA H200, aaaaaaa) |" in told
    assert told.count("| 1.20, **missed** (NVIDIA H200, aaaaaaa) |") == 2
    assert "| a pass at 1 request, ms | at most 6.5 | `serving-ours` | 6.00, met" in told


def test_attention_is_compared_where_the_peer_computes_the_same():
    """A sliding layer with the query's window, which is the one that stock has."""
    row = {"table": "attention", "layer": "sliding", "requests": 1, "context": 1024}
    row |= {"which": "stock-triton"}
    rows = [row | {"anchor": "query", "of_ours": 1.5}]
    told = report.open_figures([group(result("attention", *rows))])
    assert (
        "sliding layer, 1 request of 1024 tokens: stock-triton over ours | none | `attention` | 1.50"
        in told
    )
    assert told.count("| open |") == len(report.FIGURES) - 1


def test_wrong_kernels_are_counted():
    rows = [
        {"table": "kernels", "what": str(i), "state": s} for i, s in enumerate(["right", "WRONG"])
    ]
    told = report.open_figures([group(result("kernels", *rows))])
    assert "| 1, **missed** (NVIDIA H200, aaaaaaa) |" in told


def test_runs_stand_apart():
    """Sides of a comparison from two commits are no comparison."""
    other = Origin("b" * 40, "s" * 16, False, MACHINE)
    mixed = [
        group(serving("ours", 150, 60)),
        group(serving("stock", 100, 50, other), serving("tuned", 120, 70, other)),
    ]
    told = report.open_figures(mixed)
    assert "1.25" not in told
    assert told.count("### 2026-12-01, NVIDIA H200, driver 580.1") == 2
    assert "commit aaaaaaaaaaaa" in told
    assert "commit bbbbbbbbbbbb" in told


def test_what_failed_answers_nothing():
    rows = [{"table": "graphs", "state": "equal"}]
    found = group(result("graphs", *rows, state="timed out"))
    assert report.open_figures([found]).count("| open |") == len(report.FIGURES)
    assert "| timed out: why |" in report.where_it_ran([found])


@pytest.mark.parametrize(
    "origin",
    [
        Origin("a" * 40, "s" * 16, True, MACHINE),
        Origin("a" * 40, "s" * 16, False, MACHINE | {"gpu": None}),
    ],
    ids=["toy size", "no GPU"],
)
def test_a_rehearsal_is_never_written(origin):
    found = group(result("kernels", {"table": "kernels", "state": "right"}, origin=origin))
    assert report.publishable([found]) == []
    assert "A rehearsal without a GPU" in report.section(*found)
    for name in report.DOCUMENTS:
        page = f"before\n{report.BEGIN}old\n{report.END}after\n"
        assert "H200" not in report.with_tables(name, page, [found])


def test_a_document_without_its_place_is_named():
    with pytest.raises(ValueError, match=r"what-was-run\.md has no part between"):
        report.with_tables("docs/operate/what-was-run.md", "nothing here", [])
