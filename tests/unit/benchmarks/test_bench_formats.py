"""What bench_formats.py makes of servers' results."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any

import bench_formats
import pytest
import records
import serving


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs the script at toy size, with servers that print a log and drop so many requests."""

    def served(log: str, failed: int = 0) -> list[dict[str, Any]]:
        def ask(sweep: serving.Sweep, side: serving.Side, _: None, run: serving.Run) -> None:
            found = {"num_prompts": 1, "failed": failed, "completed": 1 - failed}
            found |= {"output_throughput": 10, "median_itl_ms": 20}
            path = sweep.result(side.name, run)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(found))
            sweep.log(side.name).write_text(log if side.name == "diffusion" else "INFO ready")

        path = tmp_path / "rows.jsonl"
        options = ["--shape", "tiny", "--formats", "bf16", "--steps", "4", "--stock"]
        monkeypatch.setattr(serving.Sweep, "serve", lambda *_: nullcontext())
        monkeypatch.setattr(serving.Sweep, "ask", ask)
        monkeypatch.setattr(bench_formats, "experts_touched", lambda folder: 2.0)
        options += ["--copy-rate", "1", "--data", str(path)]
        monkeypatch.setattr(sys, "argv", ["bench_formats.py", *options])
        bench_formats.main()
        return records.read(path)

    return served


@pytest.mark.parametrize(
    ("order", "ms_a_pass"),
    [("sync, encode fused with the next canvas", 5), ("async, encode separate", 4)],
)
def test_rows(run, order, ms_a_pass):
    """A canvas takes the passes of the order that was served, stock's one more, and a token one."""
    rows = run(f"INFO scheduler canvas_scheduler ({order})")
    assert [(row["which"], row["ms_a_pass"]) for row in rows] == [
        ("bf16, diffusion", ms_a_pass),
        ("bf16, stock diffusion", 4),
        ("bf16, autoregressive", 20),
    ]


def test_the_log_of_a_failure_is_printed(run):
    """Its file is gone when the script ends."""
    with pytest.raises(SystemExit, match=r"out of memory\ndiffusion at 1: 1 of 1 requests failed"):
        run("out of memory", failed=1)
