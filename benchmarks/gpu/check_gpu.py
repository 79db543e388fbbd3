"""Whether kernels and their graphs, executed on this device, compute what the references do eagerly.

    python benchmarks/gpu/check_gpu.py             # the layers of DiffusionGemma-26B
    python benchmarks/gpu/check_gpu.py --toy

The checks are those of ``vllm-diffusion doctor --gpu``, without vLLM, in this process, and with an FP8 cache too.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from probe import Checks, run_checks
from timing import device

from vllm_diffusion.canvas.cuda_graphs import Capture, cuda_capture
from vllm_diffusion.kernel_choice import graphs
from vllm_diffusion.kernel_choice.cases import KernelCase, Served, published_26b
from vllm_diffusion.kernel_choice.child import run_case
from vllm_diffusion.kernel_choice.step_shape import StepShape, free_canvas
from vllm_diffusion.startup.kernel_choices import KernelChoices, LayerKind

DEVICE = device()
# A step leaves out what is unlikely, which is checked beside the whole soft embedding.
SKIPPING = KernelChoices(skip_unlikely=True)


def served(toy: bool) -> Served:
    """What is checked."""
    if toy:
        kinds = (LayerKind(2, 2, 16, 15, "auto"), LayerKind(2, 1, 32, -1, "auto"))
        step = StepShape(
            free_canvas(8), vocab=300, hidden=16, slots=4, dtype="float32", kernels=SKIPPING
        )
        return Served(kinds, replace(step, vocab=300), max_model_len=40)
    shape = published_26b()
    kinds = (replace(kind, cache_dtype=cache) for kind in shape.kinds for cache in ("auto", "fp8"))
    return replace(shape, kinds=tuple(kinds), step=replace(shape.step, kernels=SKIPPING))


def capture_of_device() -> Capture:
    """How functions are captured: as graphs on a GPU, emulated on a CPU."""
    if DEVICE.type == "cuda":
        return cuda_capture()
    from tests.support.graphs import emulated_capture

    return emulated_capture


def graph(case: KernelCase) -> str:
    """A replay beside the eager call."""
    (shape,) = case.shapes
    stream = contextlib.nullcontext()
    if DEVICE.type == "cuda":
        stream = torch.cuda.stream(torch.cuda.Stream())
    with stream:
        if isinstance(shape, StepShape):
            graphs.check_step_graph(shape, DEVICE, capture_of_device())
        else:
            graphs.check_attention_graph(shape, "triton", DEVICE, capture_of_device())
    return "equal"


def kernel(case: KernelCase) -> str:
    """A kernel beside its reference."""
    return f"off by {run_case(case, DEVICE).difference:.1e}"


def checks(toy: bool) -> Checks:
    """The implementation of each kernel that serves by default, and the graphs."""
    what = served(toy)
    found: dict[str, Callable[[], str]] = {}
    for role in what.roles():
        if role.cases[0].kernel == "cache writes":
            # VLLM's own.
            continue
        found[role.cases[0].name] = lambda case=role.cases[0]: kernel(case)
    for role in what.graph_roles():
        found[role.cases[0].name] = lambda case=role.cases[0]: graph(case)
    return found


if __name__ == "__main__":
    sys.exit(run_checks("kernels", __doc__, checks))
