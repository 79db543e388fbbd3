"""Operators of vLLM's compiled extension that models call directly, in PyTorch.

Drafts of ``method: dflash`` prepare keys and values of their context with them, whatever
``custom_ops`` is. They are registered for CPU tensors only, beside the extension's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb

# A library ends with the object that made it.
_LIBRARIES: list[Any] = []


def register() -> None:
    """Define what the extension has not. Safe to call twice."""
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
