"""What the campaign's report makes of results, and where it writes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import records
import report
import results
from results import Origin, Result

MACHINE = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.14", "triton": "3.8"}
MACHINE["vllm"] = "0.33"
H200 = Origin("a" * 40, "s" * 16, False, MACHINE)


def group(origin: Origin, **rows: list[dict[str, Any]]) -> tuple[Origin, dict[str, Result]]:
    """Results of experiments that are done, by name, with a dash for each underscore."""
    names = {name.replace("_", "-"): some for name, some in rows.items()}
    return origin, {
        name: Result(name, "done", "", "python x", origin, "2026-12-01", 3.0, some)
        for name, some in names.items()
    }


def serving(side: str, speed: float, first: float) -> list[dict[str, Any]]:
    return [
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


OURS, STOCK, TUNED = serving("ours", 150, 60), serving("stock", 100, 50), serving("tuned", 120, 70)


def test_document():
    """gpu-figures.md says what the kept results do, and no more."""
    page = records.DOCUMENT.read_text(encoding="utf-8")
    table = report.table(results.read_all(results.kept()))
    assert records.with_part(page, "campaign", table) == page, (
        "run python benchmarks/gpu/campaign.py report --write"
    )


def test_figures_are_those_of_the_rows():
    """Against the better stock of each; a target is met or missed, and the rest is open."""
    found = group(H200, serving_ours=OURS, serving_stock=STOCK, serving_tuned=TUNED)
    said = report.table([found])
    assert "requests: 1; over the better stock | at least 1.1 | 1.13 | `serving-ours`" in said
    assert "| 1.25, met (NVIDIA H200, aaaaaaa) |" in said
    assert "requests: 8; over the better stock | at least 2 | 1.27 |" in said
    assert "| 1.25, **missed** (NVIDIA H200, aaaaaaa) |" in said
    assert said.count("| 1.2, **missed** (NVIDIA H200, aaaaaaa) |") == 2
    assert "| a pass at 1 request, ms | at most 6.5 | 9.91 | `serving-ours` | 6, met" in said
    assert said.count("| open |") == len(report.FIGURES) - 8


def test_attention_is_compared_where_the_peer_computes_the_same():
    """A sliding layer with the query's window, which is the one that stock has."""
    row = {"table": "attention", "layer": "sliding", "requests": 1, "context": 1024}
    row |= {"which": "stock-triton", "anchor": "query", "of_ours": 1.5}
    said = report.table([group(H200, attention=[row])])
    text = "sliding layer, requests of 1024 tokens: 1; stock-triton over ours"
    assert f"{text} | none | 5.89 | `attention` | 1.5" in said
    assert said.count("| open |") == len(report.FIGURES) - 1


def test_wrong_kernels_are_counted():
    """Not what the probe finds of the device, which is in the same file."""
    rows = [{"table": "kernels", "state": state} for state in ("right", "WRONG")]
    rows.append({"table": "probe", "state": "cannot run"})
    said = report.table([group(H200, kernels=rows)])
    assert "| 1, **missed** (NVIDIA H200, aaaaaaa) |" in said


def test_runs_stand_apart():
    """Sides of a comparison from two commits are no comparison."""
    other = replace(H200, commit="b" * 40)
    mixed = [
        group(H200, serving_ours=OURS),
        group(other, serving_stock=STOCK, serving_tuned=TUNED),
    ]
    said = report.table(mixed)
    assert "1.25" not in said
    assert said.count("### 2026-12-01, NVIDIA H200, driver 580.1") == 2
    assert "commit aaaaaaaaaaaa" in said
    assert "commit bbbbbbbbbbbb" in said


def test_what_failed_answers_nothing():
    origin, found = group(H200, kernels=[{"table": "kernels", "state": "right"}])
    assert report.table([(origin, found)]).count("| open |") == len(report.FIGURES) - 1
    probe = group(H200, kernels=[{"table": "probe", "state": "right"}])
    assert report.table([probe]).count("| open |") == len(report.FIGURES)
    found["kernels"] = replace(found["kernels"], state="timed out", reason="why")
    said = report.table([(origin, found)])
    assert said.count("| open |") == len(report.FIGURES)
    assert "| kernels | timed out | 3.0 | why | `python x` |" in said


def test_what_was_cut_answers_by_the_rows_it_has():
    """A row is a measurement; that none of the kernels is wrong takes all of them."""
    row = {"table": "attention", "layer": "sliding", "requests": 1, "context": 1024}
    row |= {"which": "stock-triton", "anchor": "query", "of_ours": 1.5}
    kernels = [{"table": "kernels", "state": "right"}]
    origin, found = group(H200, attention=[row], kernels=kernels)
    cut = {name: replace(result, state="cut", reason="why") for name, result in found.items()}
    said = report.table([(origin, cut)])
    assert "stock-triton over ours | none | 5.89 | `attention` | 1.5" in said
    assert said.count("| open |") == len(report.FIGURES) - 1


@pytest.mark.parametrize(
    "origin",
    [replace(H200, toy=True), replace(H200, machine=MACHINE | {"gpu": None})],
    ids=["toy size", "no GPU"],
)
def test_a_rehearsal_is_never_written(origin):
    found = group(origin, kernels=[{"table": "kernels", "state": "right"}])
    assert "A rehearsal" in report.states(*found)
    assert report.table([found]) == report.table([])
    assert "H200" not in report.table([found])


def test_a_part_of_the_document_is_replaced():
    """What is around it stays; a page without its place is named."""
    page = "before\n<!-- x -->\nold\n<!-- end of x -->\nafter\n"
    written = records.with_part(page, "x", "| new |\n")
    assert written == "before\n<!-- x -->\n\n| new |\n\n<!-- end of x -->\nafter\n"
    with pytest.raises(ValueError, match=r"gpu-figures\.md has no part between <!-- y -->"):
        records.with_part(page, "y", "")
