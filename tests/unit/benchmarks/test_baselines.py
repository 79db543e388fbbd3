"""The passes of an answer are no more than they were, and what a baseline is."""

from __future__ import annotations

import json
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


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.delenv("UPDATE_BASELINES", raising=False)
    path = tmp_path / "baselines.json"
    path.write_text(json.dumps({"launches": {"a pass": {"kernels": 10, "copies": 2}}}))
    monkeypatch.setattr(baselines, "PATH", path)
    return path


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"a pass": {"kernels": 11, "copies": 2}}, "a pass: kernels is 11, was 10"),
        ({"a pass": {"kernels": 10}}, "other columns"),
        ({"a pass": {"kernels": 1, "copies": 2}, "another": {}}, "other rows"),
        ({}, "other rows"),
    ],
    ids=["grown", "a number gone", "one that has none", "a row gone"],
)
def test_what_the_checker_sees(file, measured, said):
    with pytest.raises(AssertionError, match=said):
        baselines.check("launches", measured)


def test_what_the_checker_lets_pass(file):
    baselines.check("launches", {"a pass": {"kernels": 10, "copies": 0}})
    baselines.check("launches", {"a pass": {"kernels": 13, "copies": 2}}, slack=1.3)


def test_baselines_are_recorded(file, monkeypatch):
    """A section anew, the others as they were."""
    monkeypatch.setenv("UPDATE_BASELINES", "1")
    baselines.check("bytes", {"b": {"mib": 3}, "a": {"mib": 4}})
    assert json.loads(file.read_text()) == {
        "launches": {"a pass": {"kernels": 10, "copies": 2}},
        "bytes": {"a": {"mib": 4}, "b": {"mib": 3}},
    }
