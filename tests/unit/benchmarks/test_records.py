"""Rows of benchmarks: what is kept of them, and how they are printed."""

from __future__ import annotations

import records


def test_a_cell_of_several_lines(tmp_path, capsys):
    """It is kept as it is, and printed in one line."""
    path = tmp_path / "rows.jsonl"
    records.Rows(path).add("kernels", what="one", found="no such\n  kernel", left=None)
    row = {"table": "kernels", "what": "one", "found": "no such\n  kernel", "left": None}
    assert records.read(path) == [row]
    assert "| one | no such kernel |  |\n" in capsys.readouterr().out


def test_rows_that_were_cut_off(tmp_path):
    """A line that a kill left half written is no row."""
    path = tmp_path / "rows.jsonl"
    records.Rows(path).add("t", value=1)
    with path.open("a") as file:
        file.write('{"table": "t", "val')
    assert records.read(path) == [{"table": "t", "value": 1}]
