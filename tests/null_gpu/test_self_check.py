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


@pytest.mark.slow
def test_served_by_the_reference(null_gpu):
    """Where nothing is right, every kind of request passes all the same; graphs hold the backbone's layers."""
    fates = {"triton": "wrong", "cute": "raises"}
    outcome = null_gpu.run(
        f"{CASES}:serve_checked", model=str(SHIPPED), options=CAPTURED, fates=fates
    )
    chosen = outcome.checked()["chosen"]
    assert chosen["graphs"] == "PIECEWISE"
    kernels = ("attention", "statistics", "kept_rows")
    assert [chosen["choices"][name] for name in kernels] == ["reference"] * 3
    assert "takes many times as long" in outcome.text()
