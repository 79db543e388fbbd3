"""A start checks its kernels in a process of its own, and serves with what is right."""

from __future__ import annotations

import pytest

from tests.support.checkpoints import SHIPPED

pytestmark = pytest.mark.engine

CASES = "tests.null_gpu.engine_cases"
CAPTURED = {"compilation_config": {"backend": "eager"}}


def test_a_gpu_that_computes_nothing(null_gpu):
    """The process that checks runs on the GPU, and its outcome counts: nothing is served."""
    checked = {"additional_config": {"diffusion": {"self_check": "auto"}}}
    options = {"enforce_eager": True} | checked
    outcome = null_gpu.run(f"{CASES}:serve", model=str(SHIPPED), options=options, kinds=["plain"])
    assert "This GPU computes wrongly without any kernel" in outcome.error
    assert "PyTorch's own matrix product is wrong" in outcome.error
    assert "Traceback" not in outcome.error


def test_served_by_the_reference(null_gpu):
    """Where nothing is right, every kind of request passes all the same; graphs hold the backbone's layers."""
    fates = {"triton": "wrong", "cute": "raises", "graph": "wrong"}
    outcome = null_gpu.run(
        f"{CASES}:serve_checked", model=str(SHIPPED), options=CAPTURED, fates=fates
    )
    chosen = outcome.checked()["chosen"]
    assert chosen["graphs"] == "PIECEWISE"
    served = {
        impl for phases in chosen["choices"]["attention"].values() for impl in phases.values()
    }
    assert served == {"reference"}
    assert len(chosen["choices"]["attention"]) == len(chosen["kinds"]) == 2
    assert chosen["choices"]["statistics"] == chosen["choices"]["kept_rows"] == "reference"
    assert not chosen["choices"]["step_graphs"]
    assert "with other sampling settings" not in outcome.text(), "the sampler was captured"
    assert "takes many times as long" in outcome.text()


@pytest.mark.slow
def test_served_without_graphs_that_are_wrong(null_gpu):
    """Kernels stay, and the sampler runs uncaptured."""
    fates = {"graph": "wrong"}
    outcome = null_gpu.run(
        f"{CASES}:serve_checked", model=str(SHIPPED), options=CAPTURED, fates=fates
    )
    chosen = outcome.checked()["chosen"]
    assert chosen["graphs"] == "PIECEWISE"
    assert not chosen["choices"]["step_graphs"]
    assert "with other sampling settings" not in outcome.text(), "the sampler was captured"
