"""Matrix products whose rows do not depend on how many rows there are.

On a CPU a math library takes other paths for few rows, which round differently, so a request would
read differently alone and in a batch. Above a library's smallest number of rows products were
bit-identical row by row for every number of rows tried (``tests/unit/cpu/test_linear.py``), so
smaller ones are padded.

``F.linear`` takes MKL for float32, which stays with AVX2 on AMD's processors. oneDNN goes by what
the processor can do: with AVX-512 the same products take less than half of the time, with AVX2 as
much or a fifth less, and with few rows a third, since they need no padding.

Operators of vLLM's compiled extension that models call directly are here too. Drafts of
``method: dflash`` prepare keys and values of their context with them, whatever ``custom_ops`` is.
They are registered for CPU tensors only, in addition to the extension's own.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

from vllm_diffusion.hooks.replacement import replaces_call

# The fewest rows that round as many do.
MIN_ROWS = 16
MIN_ROWS_ONEDNN = 2
# Elements of a float32 weight from which oneDNN is asked. It prepares each new number of rows for
# 0.4 ms, and a call takes some 8 microseconds more: small weights never earn that back.
MIN_ONEDNN_ELEMENTS = 2**17


@replaces_call(
    "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    reason="Rounds a row by its neighbours, and packs weights with the CPU extension.",
    until="A platform may name its unquantised product.",
)
def _bound_to_ours(stock: object, layer: nn.Module, remove_weight: bool) -> None:
    # The weight stays where it is.
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
    # By the weight alone: rows must not decide how a row is rounded.
    by_onednn = (
        weight.dtype == torch.float32
        and weight.numel() >= MIN_ONEDNN_ELEMENTS
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )
    rows = x.reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    min_rows = MIN_ROWS_ONEDNN if by_onednn else MIN_ROWS
    if num_rows < min_rows:
        padded = torch.zeros(min_rows, rows.shape[1], dtype=x.dtype)
        padded[:num_rows] = rows
        rows = padded
    product = _onednn_linear(rows, weight, bias) if by_onednn else F.linear(rows, weight, bias)
    product = product[:num_rows]
    return product.view(*x.shape[:-1], product.shape[-1])


def _onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return product


# A library ends with the object that made it.
_LIBRARIES: list[Any] = []


def register() -> None:
    """Make vLLM's linear layers use :func:`linear`, and define what the extension has not.

    Safe to call twice.
    """
    _bound_to_ours.install()
    define(
        "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
        rms_norm,
        "CPU",
    )
    define(
        "rotary_embedding(Tensor positions, Tensor! query, Tensor(b!)? key, int head_size, "
        "Tensor cos_sin_cache, bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        rotary_embedding,
        "CPU",
    )
    define("gelu_quick(Tensor! out, Tensor input) -> ()", gelu_quick, "CPU")
    # vLLM's worker binds memory to a NUMA node with it, which is not needed to be correct.
    define(
        "init_cpu_memory_env(int[] nodes) -> ()", lambda nodes: None, "CompositeExplicitAutograd"
    )


def define(schema: str, operator: Callable[..., None], key: str) -> None:
    """Define an operator of vLLM's compiled extension, unless it has it.

    Args:
        schema: The operator's name and signature, as torch writes them.
        operator: Function that does what the operator does.
        key: Dispatch key of torch for which it is defined.
    """
    name = schema.partition("(")[0]
    if hasattr(torch.ops._C, name):
        return
    library: Any = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(schema)
    library.impl(name, operator, key)
    _LIBRARIES.append(library)


def rms_norm(result: Tensor, input: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Write ``input`` over its root mean square, times ``weight``, rounded as vLLM's layer does.

    Args:
        result: Output, like ``input``.
        input: [..., size].
        weight: [size]; or [num_groups, size], one for each of the first dimension of ``input``.
        epsilon: Added to the mean of squares.
    """
    x = input.float()
    x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    if weight is not None:
        if weight.dim() == 2:
            weight = weight.view(len(weight), *[1] * (x.dim() - 2), -1)
        x = x.to(weight.dtype) * weight
    result.copy_(x)


def gelu_quick(out: Tensor, input: Tensor) -> None:
    """Write ``input`` times the sigmoid of 1.702 ``input``.

    vLLM's layer takes the operator when it is made, and computes without it on a CPU.

    Args:
        out: Output, like ``input``.
        input: Any shape.
    """
    out.copy_(input * torch.sigmoid(1.702 * input))


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate heads of ``query`` and ``key`` in place.

    Args:
        positions: [num_tokens].
        query: [num_tokens, num_heads * head_size], or with heads as a dimension; written.
        key: Keys like ``query``, or ``None``.
        head_size: Elements of a head.
        cos_sin_cache: [max_position, rotary_dim], cosines, then sines.
        is_neox: True if an element's partner is half a rotated part away; false if it is adjacent.
        rope_dim_offset: Elements of a head before those that are rotated.
        inverse: True to rotate back.
    """
    cos, sin = cos_sin_cache[positions.flatten()].chunk(2, dim=-1)
    if inverse:
        sin = -sin
    end = rope_dim_offset + cos_sin_cache.shape[-1]
    for tensor in (query, key):
        if tensor is None:
            continue
        part = tensor.view(len(cos), -1, head_size)[..., rope_dim_offset:end]
        part.copy_(ApplyRotaryEmb.forward_static(part, cos, sin, is_neox))
