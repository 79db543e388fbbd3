"""Processes on the null GPU, one for each kind of case, that the tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.null_gpu.build import build, missing
from tests.support.null_gpu.processes import NullGpu

# Its checkpoints of the 26B shape are those of a benchmark, and benchmarks are scripts.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))


@pytest.fixture(scope="session", autouse=True)
def null_gpu_libraries() -> None:
    """The null GPU, compiled; skips the tests where nothing can compile it."""
    lacks = missing()
    if lacks is not None:
        pytest.skip(lacks)
    build()


@pytest.fixture(scope="session")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NullGpu]:
    """Cases of plain torch."""
    with NullGpu(tmp_path_factory.mktemp("null_gpu"), imports="torch") as running:
        yield running


@pytest.fixture(scope="session")
def null_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NullGpu]:
    """Cases of vLLM."""
    with NullGpu(tmp_path_factory.mktemp("null_gpu"), imports="vllm") as running:
        yield running
