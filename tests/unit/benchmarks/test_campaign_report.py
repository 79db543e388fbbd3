"""Tests of the figures in the campaign's report, and of where it is written."""

from typing import Any

import pytest
import records
import report
import results
from figures import FIGURES
from results import Facts, Origin, Result, Run

MACHINE = {"gpu": "NVIDIA H200", "driver": "580.1", "torch": "2.14", "triton": "3.8"}
H200 = Origin("a" * 40, MACHINE | {"vllm": "0.33"})


def run_of(
    started: str = "2026-12-01", facts: Facts | None = None, **rows: list[dict[str, Any]]
) -> Run:
    """Return results by experiment, with a dash for each underscore."""
    names = {name.replace("_", "-"): some for name, some in rows.items()}
    found = {
        name: Result(name, "done", "", "python x", H200, started, 3.0, some)
        for name, some in names.items()
    }
    return Run(H200, found, facts or Facts())


def serving(side: str, speed: float, first: float, attention: str) -> list[dict[str, Any]]:
    keys = {"table": "serving", "side": side, "attention": attention, "ms_to_first": first}
    return [keys | {"requests": n, "tokens_a_second": speed * n} for n in (1, 8, 32)]


OURS = serving("ours", 150, 60, "CanvasAttentionBackend")
FA4 = "FLASH_ATTN, FlashAttention 4"
STOCK, TUNED = serving("stock", 100, 50, FA4), serving("tuned", 120, 70, FA4)
ON_TRITON = Facts(stock_attention="TRITON_ATTN")


def lines(table: str, word: str) -> list[str]:
    """Return the rows that contain a word."""
    return [line for line in table.splitlines() if word in line]


def test_document():
    """gpu-figures.md begins with the measurements, and its tables are those of the kept results."""
    page = records.DOCUMENT.read_text(encoding="utf-8")
    runs = results.read_all(sorted(path for path in results.RESULTS.iterdir() if path.is_dir()))
    written = records.with_part(page, "measured", report.measured(runs))
    written = records.with_part(written, "open", report.still_open(runs))
    assert written == page, "run python benchmarks/gpu/campaign.py report --write"
    first_table = page.index("\n|")
    assert page.index("<!-- measured -->") < first_table < page.index("<!-- end of measured -->")


def test_a_ratio_names_its_peer():
    """The peer's back end comes from stock's rows, or from the facts if the rows do not name it."""
    named = run_of(serving_both_32=OURS + STOCK)
    ratio = "| tokens a second over stock's at 1, 8 and 32 requests | 1.5, 1.5, 1.5"
    assert (
        f"; at least 1.5, 1.5, 1.5 of stock with FlashAttention 4: met | 1.13, 1.27, 1.27 | stock, {FA4} |"
        in (lines(report.measured([named]), ratio)[0])
    )
    silent = OURS + serving("stock", 100, 50, "not told")
    told = run_of(serving_both_32=silent, facts=ON_TRITON)
    assert len(lines(report.measured([told]), "| stock, TRITON_ATTN |")) == 3
    with pytest.raises(ValueError, match=r"stock's attention back end; write stock_attention"):
        report.measured([run_of(serving_both_32=silent)])


def test_a_target_of_a_ratio_is_open_without_flash_attention_4():
    """A ratio to stock on another back end neither meets nor misses the target."""
    on_triton = OURS + serving("stock", 100, 50, "TRITON_ATTN")
    table = report.measured([run_of(serving_both_32=on_triton)])
    assert "| 1.5, 1.5, 1.5 |" in table
    target = "at least 1.5, 1.5, 1.5 of stock with FlashAttention 4"
    for stock, is_open in ((on_triton, True), (OURS + STOCK, False)):
        left = report.still_open([run_of(serving_both_32=stock)])
        assert any(target in row for row in lines(left, "`serving-both-32`")) == is_open


def test_figures_are_those_of_the_rows():
    """Ratios are relative to the better stock server, and targets are met or missed by them."""
    kernels = [{"table": "kernels", "state": state} for state in ("right", "WRONG")]
    # What the probe finds of the device is not a kernel.
    probed = {"copied, GB/s": "4216", "bf16 product, TFLOP/s": "694"}
    kernels += [{"table": "probe", "what": what, "found": found} for what, found in probed.items()]
    shape = {"table": "attention", "layer": "sliding", "requests": 1, "context": 1024}
    # A sliding layer with the query's window, which is the one that stock has.
    attention = [shape | {"which": "stock-triton", "anchor": "query", "of_ours": 1.5}]
    run = run_of(
        serving_ours=OURS,
        serving_stock=STOCK,
        serving_tuned=TUNED,
        attention=attention,
        kernels=kernels,
    )
    table = report.measured([run])
    assert (
        "| tokens a second at 1, 8 and 32 requests, over the better stock | 1.25, 1.25, 1.25 |"
        in table
    )
    assert lines(table, "1.2, 1.2, 1.2; at most 1, 1, 1: **missed**")
    assert lines(table, "| 1; at most 0: **missed** |")
    assert lines(table, "| 4,216, 694 | 3,015, 593 |")
    row = lines(table, "attention, sliding layer, requests of 1,024 tokens: 1")[0]
    assert "| 1.5, -, -, -, -, - | 5.89, 1, 1, -, -, - | stock-triton," in row
    left = report.still_open([run])
    assert not lines(left, "`serving-ours`")
    # Its target is missed, which is an answer too.
    assert not lines(left, "`kernels`")
    assert lines(left, "`attention`")[0].endswith("| done, H200, aaaaaaa |")


def test_cute_is_right_only_where_it_ran():
    """A refused FP8 cache leaves ``cute`` right; another refusal or no check leaves it open."""
    (right,) = [figure for figure in FIGURES if figure.experiments == "cute"]
    found, refused = "off by 1e-03", "triton is off by 1e-03; cute refuses: no CUDA"

    def measured(**founds: str) -> list[float | None] | None:
        layers = {"bf16": "attention of 256, cute", "fp8": "attention of 256, fp8 cache, cute"}
        rows = [
            {"table": "kernels", "what": layers[name], "found": text, "state": state}
            for name, (text, state) in founds.items()
        ]
        return right.measured(run_of(cute=rows).found)

    assert measured(bf16=(found, "right"), fp8=(refused, "right")) == [0]
    assert measured(bf16=("off by 3", "WRONG"), fp8=(refused, "right")) == [1]
    assert measured(bf16=(refused, "right"), fp8=(refused, "right")) is None
    assert measured() is None


def test_newest_first_and_each_figure_once():
    """Each figure is the newest on its kind of GPU, and an older run shows only the rest."""
    kernels = [{"table": "kernels", "state": "right"}]
    by_hand = Facts(figures=[{"text": "by hand", "measured": "3", "experiment": "answers"}])
    old = run_of("2026-12-01", by_hand, kernels=kernels, serving_ours=OURS)
    new = run_of("2026-12-02", kernels=kernels)
    rows = report.measured([old, new]).splitlines()[2:]
    assert [row.split("|")[1].strip()[6:16] for row in rows] == ["2026-12-02", *["2026-12-01"] * 2]
    assert "| by hand | 3 |" in rows[-1]
    assert not lines(report.still_open([old, new]), "`answers`")
    assert lines(report.still_open([new]), "`answers`")
