"""Matrix products whose rows do not depend on how many rows there are.

On a CPU the math library takes other paths for few rows, which round differently, so a request
would read differently alone and in a batch. Products of at least :data:`MIN_ROWS` rows were
bit-identical row by row for every number of rows tried (``tests/unit/cpu/test_linear.py``), so
smaller ones are padded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm_diffusion.hooks.replacement import replaces

MIN_ROWS = 16


def register() -> None:
    """Make vLLM's linear layers use :func:`linear`. Safe to call twice."""
    _bound_to_ours.install()


@replaces(
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    reason="Rounds a row by its neighbours, and packs weights with the CPU extension.",
    until="A platform may name its unquantised product.",
)
def _bound_to_ours(stock: object) -> object:
    return bind_linear


def bind_linear(layer: nn.Module, remove_weight: bool) -> None:
    """In place of vLLM's choice of a packed CPU product; the weight stays where it is."""
    layer.cpu_linear = linear  # type: ignore[assignment]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` with rows that do not depend on their number.

    Args:
        x: [..., in_features].
        weight: [out_features, in_features].
        bias: [out_features], or ``None``.

    Returns:
        [..., out_features].
    """
    rows = x.reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    if num_rows < MIN_ROWS:
        padded = torch.zeros(MIN_ROWS, rows.shape[1], dtype=x.dtype)
        padded[:num_rows] = rows
        rows = padded
    product = F.linear(rows, weight, bias)[:num_rows]
    return product.view(*x.shape[:-1], product.shape[-1])
