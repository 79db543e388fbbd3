"""Kernels are timed on the GPU in a process of their own, and engines capture what a file says."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import SHIPPED

pytestmark = pytest.mark.engine

CASES = "tests.null_gpu.engine_cases"


def test_kernels_are_timed(null_gpu):
    """Each way is captured by CUDA's rules, two streams too, and replayed in each round; nothing is printed between."""
    outcomes = null_gpu.run(f"{CASES}:time_kernels").checked()
    assert [(each["state"], "microseconds" in each) for each in outcomes] == [("right", True)] * 8


def test_a_tuned_engine(null_gpu, tmp_path):
    """The file reaches the worker, whose graphs hold two streams, and requests are served."""
    outcome = null_gpu.run(
        f"{CASES}:serve_tuned",
        model=str(SHIPPED),
        options={"compilation_config": {"backend": "eager"}},
        path=str(tmp_path / "tuned.json"),
    )
    found = outcome.checked()
    assert found["chosen"]["choices"] == found["tuned"]
    for line in (
        "denoise: triton, splits up to 2",
        "skip_unlikely: true",
        "streams of the sampler: 2",
    ):
        assert line in outcome.text()
