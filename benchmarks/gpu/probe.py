"""What the device reaches, and whether it does what the kernels rely on.

python benchmarks/gpu/probe.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from checks import run_checks
from timing import copy_rate, device, milliseconds, product_rate

DEVICE = device()
ON_GPU = DEVICE.type == "cuda"


def product_in_float32() -> str:
    """The soft embeddings' product: bf16 factors added to float32 in place."""
    rows, ids, width = (256, 4096, 2816) if ON_GPU else (8, 64, 16)
    a = torch.randn(rows, ids, device=DEVICE).to(torch.bfloat16)
    b = torch.randn(ids, width, device=DEVICE).to(torch.bfloat16)
    target = torch.randn(rows, width, device=DEVICE)
    expected = target.double() + a.double() @ b.double()
    if ON_GPU:
        torch.addmm(target, a, b, out_dtype=torch.float32, out=target)
    else:
        # The CPU has no such product, and serving calls none there.
        target += a.float() @ b.float()
    error = ((target.double() - expected).norm() / expected.norm()).item()
    assert error < 1e-3, f"off by {error:.1e}"
    return f"off by {error:.1e}"


def graph() -> str:
    """A graph is captured and replayed."""
    if not ON_GPU:
        return "no graphs on a CPU"
    from vllm_diffusion.canvas.cuda_graphs import cuda_capture

    x = torch.ones(1024, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        replay = cuda_capture()(lambda: x * 2, ())
        x.fill_(3)
        y = replay()
        torch.cuda.synchronize()
        assert bool((y == 6).all()), "a replay did not read the new input"
        median, _, _ = milliseconds(replay)
    return f"{1e3 * median:.1f} us a replay of one kernel"


def host_copy() -> str:
    """What the engine's staged writes do: from pinned memory, without a wait."""
    from vllm.utils.torch_utils import async_tensor_h2d

    array = torch.arange(64).numpy()
    assert async_tensor_h2d(array, device=DEVICE).tolist() == array.tolist()
    return "as expected"


CHECKS: dict[str, Callable[[], str]] = {
    "copied, GB/s": lambda: f"{copy_rate(2**30 if ON_GPU else 2**20) / 1e9:.0f}",
    "bf16 product, TFLOP/s": lambda: f"{product_rate(8192 if ON_GPU else 64) / 1e12:.3g}",
    "bf16 product added to float32 in place": product_in_float32,
    "graph": graph,
    "pinned copy": host_copy,
}


if __name__ == "__main__":
    sys.exit(run_checks("probe", __doc__, lambda toy: CHECKS))
