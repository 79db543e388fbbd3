"""How benchmarks take a time, and what a device reaches at most."""

import contextlib
import importlib.metadata
import os
import statistics
import time
from collections.abc import Callable

import torch

if not torch.cuda.is_available():
    # Kernels run in Triton's interpreter then, which is chosen when Triton is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Environment of a server of stock's own classes: on a CPU they need our platform.
STOCK = {"VLLM_PLUGINS": "vllm_diffusion_cpu"}
if torch.cuda.is_available():
    STOCK = {"VLLM_DIFFUSION_DISABLE": "1"}
REPEATS = 30
# What a GPU spends on a call at the most, beside its warm-up.
GPU_MILLISECONDS = 100


def device() -> torch.device:
    """The GPU, or the CPU of a machine without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def place(*packages: str) -> str:
    """The device and the versions of what is measured, for a table's head."""
    found = [torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"]
    for name in ("torch", "triton", "vllm", *packages):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def milliseconds(call: Callable[[], object], repeats: int = REPEATS) -> tuple[float, float, float]:
    """Median, first and third quartile of a call's time.

    Args:
        call: What to time. It has run before it is timed.
        repeats: How often a CPU runs it. A GPU is timed by ``triton.testing``, which empties its
            cache before each run.
    """
    if torch.cuda.is_available():
        from triton.testing import do_bench

        median, low, high = do_bench(call, rep=GPU_MILLISECONDS, quantiles=[0.5, 0.25, 0.75])
        return median, low, high
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e3)
    times.sort()
    return statistics.median(times), times[repeats // 4], times[3 * repeats // 4]


def as_served(call: Callable[[], object]) -> Callable[[], object]:
    """A call as servers make it: replayed from a graph on a GPU, where launching it would take
    longer than it does.

    Args:
        call: What reads and writes the same tensors each time.
    """
    if not torch.cuda.is_available():
        return call
    from vllm_diffusion.startup.cuda_graphs import cuda_capture

    with torch.cuda.stream(torch.cuda.Stream()):
        replay = cuda_capture()(call, ())
    torch.cuda.synchronize()
    return replay


def copy_rate(num_bytes: int = 2**30) -> float:
    """Bytes a second that a copy reads and writes on this machine."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device())
    target = torch.empty_like(source)
    median, _, _ = milliseconds(lambda: target.copy_(source), repeats=5)
    return 2 * num_bytes / median * 1e3


def product_rate(size: int = 8192) -> float:
    """Operations a second of a bf16 matrix product on this machine."""
    a, b = (torch.randn(size, size, device=device()).to(torch.bfloat16) for _ in range(2))
    median, _, _ = milliseconds(lambda: a @ b, repeats=5)
    return 2 * size**3 / median * 1e3
