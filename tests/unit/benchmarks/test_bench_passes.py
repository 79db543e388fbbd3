"""Whose tokens bench_passes.py compares, and which orders it takes."""

from __future__ import annotations

import sys
from pathlib import Path

import bench_passes
import pytest
import records

# Tokens of each row of an order.
SAID = {
    "fused": [[1], [2]],
    "asynchronous": [[1], [3]],
    "stock, sync": [[1], [4]],
    "stock, async": [[1], [5]],
}


def same_tokens(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> list[bool | None]:
    monkeypatch.setattr(
        bench_passes, "in_a_process", lambda order, _: [{"said": said} for said in SAID[order]]
    )
    monkeypatch.setattr(sys, "argv", ["bench_passes.py", "--data", str(path), *options])
    bench_passes.main()
    return [row["same_tokens"] for row in records.read(path)]


@pytest.mark.parametrize(
    ("options", "same"),
    [
        # Row by row, and in each row order by order.
        (
            ["--orders", "stock, sync", "fused", "asynchronous"],
            [None, True, True, None, True, False],
        ),
        (["--orders", "stock, sync", "fused"], [None] * 4),
        (["--orders", "stock, sync", "stock, async"], [None] * 4),
        # All loads ask the same, those of one order too.
        (["--load", "--orders", "stock, sync", "fused"], [None, True, None, False]),
    ],
)
def test_the_first_order_that_is_not_stock_is_compared(monkeypatch, tmp_path, options, same):
    assert same_tokens(monkeypatch, tmp_path / "rows.jsonl", *options) == same


def test_an_order_that_is_not_known(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        same_tokens(monkeypatch, tmp_path / "rows.jsonl", "--orders", "fused", "fast")
    assert "--orders: no 'fast' among 'fused', 'asynchronous'" in capsys.readouterr().err
