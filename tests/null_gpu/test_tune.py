"""The command ``vllm-diffusion tune`` times kernels on the GPU, and engines capture what its file says."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import SHIPPED

pytestmark = pytest.mark.engine

CASES = "tests.null_gpu.engine_cases"


@pytest.mark.timeout(600)
def test_from_the_command_to_an_engine(null_gpu, tmp_path):
    """Each way is captured by CUDA's rules, two streams too; the file reaches the worker, whose graphs hold them."""
    outcome = null_gpu.run(
        f"{CASES}:tune_and_serve",
        model=str(SHIPPED),
        options={"compilation_config": {"backend": "eager"}},
        path=str(tmp_path / "tuned.json"),
        seconds=500,
    )
    found = outcome.checked()
    assert found["status"] == 0
    splits = [f"triton, splits up to {n}" for n in (8, 4, 2, 1)]
    sampler = [
        f"skip_unlikely {skips}, {streams}"
        for skips in ("false", "true")
        for streams in ("one stream", "two streams")
    ]
    ways = [list(times) for times in found["microseconds"].values()]
    # Two kinds of layers in two phases.
    assert ways == [splits] * 4 + [sampler]
    assert found["chosen"]["choices"] == found["tuned"]
    for line in (
        "denoise: triton, splits up to 2",
        "skip_unlikely: true",
        "streams of the sampler: 2",
    ):
        assert line in outcome.text()
