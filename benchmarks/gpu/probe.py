"""What the device reaches, and whether it does what the kernels rely on.

python benchmarks/gpu/probe.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

# What it shares with the other benchmarks.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import torch
from data_file import DataFile
from timing import copy_rate, device, device_name, milliseconds, product_rate

DEVICE = device()
ON_GPU = DEVICE.type == "cuda"
# Name -> what to do. What it returns is reported, and an AssertionError is a wrong result.
Checks = Mapping[str, Callable[[], str]]


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


def run_checks(table: str, doc: str | None, make: Callable[[bool], Checks]) -> int:
    """Run a script's checks and write a row for each; 1 if one of them is not right.

    Args:
        table: Table of the rows.
        doc: The script's docstring.
        make: Makes the checks, at toy size or not.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n")[0])
    parser.add_argument("--toy", action="store_true", help="at toy size")
    parser.add_argument("--data", type=Path, help="file for the rows, as JSON lines")
    options = parser.parse_args()
    data = DataFile(options.data)
    print(device_name())
    checks = make(options.toy)
    wrong = []
    for name, check in checks.items():
        try:
            found, state = check(), "right"
        except AssertionError as error:
            found, state = " ".join(str(error).split())[:200], "WRONG"
        except Exception as error:  # one that cannot run says nothing of the others
            found, state = f"{type(error).__name__}: {str(error).strip()[:200]}", "cannot run"
        wrong += [name] * (state != "right")
        print(f"{name}: {state}, {found}", flush=True)
        data.add(table, what=name, state=state, found=found)
    if wrong:
        print(f"{len(wrong)} of {len(checks)} are not right: {'; '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


CHECKS: dict[str, Callable[[], str]] = {
    "copied, GB/s": lambda: f"{copy_rate(2**30 if ON_GPU else 2**20) / 1e9:.0f}",
    "bf16 product, TFLOP/s": lambda: f"{product_rate(8192 if ON_GPU else 64) / 1e12:.3g}",
    "bf16 product added to float32 in place": product_in_float32,
    "graph": graph,
    "pinned copy": host_copy,
}


if __name__ == "__main__":
    sys.exit(run_checks("probe", __doc__, lambda toy: CHECKS))
