"""Processes on the null GPU that the tests share, one for each kind of case."""

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
    """Compile the null GPU; skip the tests on a machine that cannot."""
    lacks = missing()
    if lacks is not None:
        pytest.skip(lacks)
    build()


@pytest.fixture(scope="session")
def torch_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NullGpu]:
    """Run cases of plain torch."""
    with NullGpu(tmp_path_factory.mktemp("null_gpu"), imports="torch") as running:
        yield running


@pytest.fixture(scope="session")
def null_gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NullGpu]:
    """Run cases of vLLM."""
    with NullGpu(tmp_path_factory.mktemp("null_gpu"), imports="vllm") as running:
        yield running
