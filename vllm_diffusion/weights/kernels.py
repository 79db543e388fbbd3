"""Log line that lists the kernels of a model's quantised layers."""

from __future__ import annotations

from collections import Counter
from typing import Any

# Attributes in which vLLM's schemes and methods keep the kernel that they chose.
_KERNEL_NAMES = ("fp8_linear", "linear_kernel", "kernel")


def describe_kernels(model: Any) -> str:
    """Count the layers by kernel.

    Args:
        model: A loaded model with a quantization config.
    """
    counts: Counter[str] = Counter()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if experts is not None:
            counts[f"experts: {type(experts).__name__}"] += 1
            continue
        for owner in (getattr(module, "scheme", None), method):
            kernel = next((k for n in _KERNEL_NAMES if (k := getattr(owner, n, None))), None)
            if kernel is not None:
                counts[f"linear: {type(kernel).__name__}"] += 1
                break
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items()))
