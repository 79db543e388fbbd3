"""The passes of an answer are no more than they were, and what a baseline is."""

from __future__ import annotations

import subprocess
import sys

import pytest
import records

from tests.support import baselines

pytest.importorskip("vllm")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_baselines_of_passes(tmp_path):
    """Of answers of one and of several canvases, alone and in a batch, in every order of ours."""
    script = records.ROOT / "benchmarks/bench_passes.py"
    orders = ("fused", "asynchronous")
    command = [sys.executable, str(script), "--rounds", "1", "--data", str(tmp_path / "data")]
    subprocess.run([*command, "--orders", *orders], check=True)
    rows = records.read(tmp_path / "data")
    passes = {f"{row['workload']}, {row['order']}": {"passes": row["passes"]} for row in rows}
    baselines.check("passes of an answer", passes)
