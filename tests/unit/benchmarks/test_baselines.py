"""Tests of the recorded numbers of passes, and of how a number is compared with its baseline."""

import subprocess
import sys

import pytest
import records

from tests.support.counters import baselines

pytest.importorskip("vllm")


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_baselines_of_passes(tmp_path):
    """Answers of one and several canvases take no more passes than the baseline, in every order."""
    script = records.ROOT / "benchmarks/bench_passes.py"
    orders = ("fused", "asynchronous")
    command = [sys.executable, str(script), "--rounds", "1", "--data", str(tmp_path / "data")]
    subprocess.run([*command, "--orders", *orders], check=True)
    rows = records.read(tmp_path / "data")
    passes = {f"{row['workload']}, {row['order']}": {"passes": row["passes"]} for row in rows}
    baselines.check("passes of an answer", passes)
