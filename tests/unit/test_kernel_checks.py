"""Tests of the kernels that ``doctor --gpu`` checks, and of the process that checks them."""

import os
import signal
import sys
from dataclasses import replace

import pytest
import torch

from attention_kernels.checks import Checked
from vllm_diffusion.cli import kernel_checks
from vllm_diffusion.cli.kernel_cases import TILE, KernelCase, Served, few_tiles
from vllm_diffusion.cli.kernel_checks import outcome_of, outcomes


@pytest.fixture
def served() -> Served:
    """Return what a configuration of one kind of layers serves.

    The engine is imported here and not above: processes of the checks import this file.
    """
    from vllm_diffusion.attention.backend import LayerKind

    kind = LayerKind(2, 1, 32, -1, "auto")
    return Served((kind,), 8, 300, 16, None, "float32", max_model_len=40)


def crashes_for_noise(case: KernelCase, device: torch.device) -> Checked:
    """Run a case, except that the check of the noise ends its process."""
    assert "vllm" not in sys.modules
    if case.kernel == "noise":
        os.kill(os.getpid(), signal.SIGSEGV)
    return kernel_checks.run_case(case, device)


def test_the_process_itself() -> None:
    """Cases run one after another without the engine, and a new process goes on after a crash."""
    cases = [KernelCase(kernel, "", "PyTorch") for kernel in ("device", "noise", "device")]
    found = [outcome for _, outcome in outcomes(cases, "cpu", crashes_for_noise)]
    assert [outcome.state for outcome in found] == ["right", "wrong", "right"]
    assert "crashed" in found[1].why
    assert found[2].difference == 0.0
    assert found[2].microseconds > 0


@pytest.mark.parametrize(
    ("error", "state", "is_last"),
    [
        (AssertionError("attention: error 3 exceeds 1\nsecond line"), "wrong", False),
        (NotImplementedError("needs a GPU of compute capability 9.x"), "refused", False),
        (ValueError("takes head_dim 256"), "refused", False),
        (AttributeError("a mistake of the check's own"), "unknown", True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "wrong", True),
        (torch.OutOfMemoryError("CUDA out of memory"), "unknown", True),
    ],
)
def test_outcomes(error: Exception, state: str, is_last: bool) -> None:
    """After a broken context no more cases run, and missing memory is not a kernel's fault."""

    def check(case: KernelCase, device: torch.device) -> Checked:
        raise error

    found = outcome_of(KernelCase("device", "", "PyTorch"), "cpu", check)
    assert (found.state, found.is_last) == (state, is_last)
    assert "\n" not in found.why


def test_kernels_that_are_checked(served: Served) -> None:
    """Each implementation of a kernel is checked, with and without spans, within the context."""
    served = replace(served, spans=(0, 8))
    cases = list(served.cases())
    attention = f"attention of {served.kinds[0].name}"
    assert [case.name for case in cases] == [
        "device, PyTorch",
        "noise, PyTorch",
        *(f"{attention}, {impl}" for impl in ("triton", "cute", "reference")),
        *("statistics, triton", "statistics, reference"),
        *("kept rows, triton", "kept rows, reference"),
    ]
    by_triton, by_cute, _ = (case for case in cases if case.kernel == "attention")
    # A prompt's end with its canvas, a whole prompt, and canvases alone.
    assert {(shape.span, shape.rows[0]) for shape in by_triton.shapes} == {
        (span, rows) for span in (0, 8) for rows in ((16, 8), (13, 13), (8, 0))
    }
    assert {shape.context for shape in by_triton.shapes} == {24}
    # FlashAttention-4 has no spans.
    assert {shape.span for shape in by_cute.shapes} == {0}


@pytest.mark.parametrize(
    ("setting", "impl"), [("auto", "triton"), ("cute", "cute"), ("reference", "reference")]
)
def test_kernels_that_serve(setting: str, impl: str, served: Served) -> None:
    """Of the attention implementations only the one that the setting chooses serves."""
    served = replace(served, attention=setting)
    assert {case.name for case in served.cases() if served.serves(case)} == {
        "device, PyTorch",
        "noise, PyTorch",
        f"attention of {served.kinds[0].name}, {impl}",
        "statistics, triton",
        "kept rows, triton",
    }


@pytest.mark.parametrize(
    ("num_ids", "few"),
    [(300, 300), (20000, 20000), (24576, 24576), (262144, 24576), (157184, 17920)],
)
def test_few_tiles(num_ids: int, few: int) -> None:
    """The small vocabulary has the same remainder in the last tile, on which Triton specializes."""
    from vllm_diffusion.sampling.vocabulary_stream import TILE_ON_GPU

    assert few_tiles(num_ids) == few
    assert (num_ids - few) % TILE == 0
    assert TILE_ON_GPU % TILE == 0
    assert TILE % 16 == 0
