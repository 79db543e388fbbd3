"""What this device reaches, whether it does what kernels rely on, and whether they compute what the
references do.

    python benchmarks/gpu/check_gpu.py
    python benchmarks/gpu/check_gpu.py --attention cute

A GPU computes the layers of DiffusionGemma-26B, and a CPU small ones in Triton's interpreter. The
checks of kernels are those of ``vllm-diffusion doctor --gpu``, in this process, and with an FP8
cache too. With ``--attention`` they are attention's alone, by an implementation that is not the
default.
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

# What it shares with the other benchmarks.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import torch
from records import Rows, flat, parser_of
from timing import copy_rate, device, milliseconds, place, product_rate

from attention_kernels.canvas_attention import Impl as AttentionImpl
from vllm_diffusion.attention.backend import LayerKind
from vllm_diffusion.cli.kernel_cases import KernelCase, Served, published_26b
from vllm_diffusion.cli.kernel_checks import run_case
from vllm_diffusion.startup.cuda_graphs import cuda_capture

DEVICE = device()
ON_GPU = DEVICE.type == "cuda"
# Name -> what to do. What it returns is reported, and an AssertionError is a wrong result.
Checks = dict[str, Callable[[], str]]


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


def replay() -> str:
    """A graph is captured and replayed."""
    if not ON_GPU:
        return "no graphs on a CPU"
    x = torch.ones(1024, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()):
        replayed = cuda_capture()(lambda: x * 2, ())
        x.fill_(3)
        y = replayed()
        torch.cuda.synchronize()
        assert bool((y == 6).all()), "a replay did not read the new input"
        median, _, _ = milliseconds(replayed)
    return f"{1e3 * median:.1f} us a replay of one kernel"


def host_copy() -> str:
    """What the engine's staged writes do: from pinned memory, without a wait."""
    from vllm.utils.torch_utils import async_tensor_h2d

    array = torch.arange(64).numpy()
    assert async_tensor_h2d(array, device=DEVICE).tolist() == array.tolist()
    return "as expected"


PROBE: Checks = {
    "copied, GB/s": lambda: f"{copy_rate(2**30 if ON_GPU else 2**20) / 1e9:.0f}",
    "bf16 product, TFLOP/s": lambda: f"{product_rate(8192 if ON_GPU else 64) / 1e12:.3g}",
    "bf16 product added to float32 in place": product_in_float32,
    "graph": replay,
    "pinned copy": host_copy,
}


def served() -> Served:
    """What is checked."""
    if not ON_GPU:
        kinds = (LayerKind(2, 2, 16, 15, "auto"), LayerKind(2, 1, 32, -1, "auto"))
        return Served(kinds, 8, 300, 16, None, "float32", max_model_len=40)
    shape = published_26b()
    kinds = (replace(kind, cache_dtype=cache) for kind in shape.kinds for cache in ("auto", "fp8"))
    return replace(shape, kinds=tuple(kinds))


def checked(case: KernelCase) -> str:
    """How far a kernel is from its reference; FlashAttention-4 may refuse inputs, which are
    Triton's then.
    """
    try:
        return f"off by {run_case(case, DEVICE).difference:.1e}"
    except (NotImplementedError, ValueError) as error:
        if case.impl != "cute":
            raise
        return f"cute refuses: {flat(error)[:120]}"


def kernels(attention: AttentionImpl) -> Checks:
    """The implementation of each kernel that serves, of attention's alone where one is asked
    for.
    """
    shape = replace(served(), attention=attention)
    return {
        case.name: partial(checked, case)
        for case in shape.cases()
        if shape.serves(case) and (attention == "auto" or case.kernel == "attention")
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--attention", choices=("auto", "triton", "cute"), default="auto")
    options = parser.parse_args()
    data = Rows(options.data)
    print(place())
    wrong = []
    # Kernels are listed after the probe, whose rows stay if that fails.
    for table, checks in (
        ("probe", lambda: PROBE),
        ("kernels", partial(kernels, options.attention)),
    ):
        for name, check in checks().items():
            try:
                found, state = check(), "right"
            except AssertionError as error:
                found, state = flat(error)[:200], "WRONG"
            except Exception as error:  # one that cannot run says nothing of the others
                found, state = f"{type(error).__name__}: {flat(error)[:200]}", "cannot run"
            wrong += [name] * (state != "right")
            data.add(table, what=name, state=state, found=found)
    if wrong:
        print(f"{len(wrong)} are not right: {'; '.join(wrong)}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
