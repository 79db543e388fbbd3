"""What check_gpu.py reports where something fails."""

from __future__ import annotations

import sys

import check_gpu
import pytest
import records


def fail() -> str:
    raise RuntimeError("no such\ndevice")


def test_rows_of_the_probe_stay(tmp_path, monkeypatch):
    """Kernels that cannot be listed leave what was found before, each on a line of its own."""

    def kernels() -> check_gpu.Checks:
        raise ValueError("no kernels")

    path = tmp_path / "rows.jsonl"
    monkeypatch.setattr(check_gpu, "PROBE", {"copy": lambda: "3", "graph": fail})
    monkeypatch.setattr(check_gpu, "kernels", kernels)
    monkeypatch.setattr(sys, "argv", ["check_gpu.py", "--data", str(path)])
    with pytest.raises(ValueError, match="no kernels"):
        check_gpu.main()
    found = [(row["what"], row["state"], row["found"]) for row in records.read(path)]
    assert found == [
        ("copy", "right", "3"),
        ("graph", "cannot run", "RuntimeError: no such device"),
    ]
