"""Tensors of a quantised module, for each format that can be checked."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

from vllm_diffusion.weights.tensor_rules import Shape

# Numbers that share a scale in NVFP4.
GROUP_SIZE = 16
# Dtypes by safetensors' names.
FP8 = "F8_E4M3"
PACKED = "U8"
FLOATS = ("F64", "F32", "F16", "BF16")

# Allowed dtypes of a tensor, and its equivalent shapes.
Spec = tuple[tuple[str, ...], tuple[Shape, ...]]
_ONE_NUMBER: Spec = (FLOATS, ((), (1,)))


@dataclass(frozen=True)
class Format:
    """Storage of a checkpoint's quantised modules.

    Attributes:
        name: Name in the checkpoint's config.
        is_fp4: True if weights are NVFP4.
        quantizes: Takes all names of a module, and returns true if it is quantised.
        tensors: Takes a module's [out_features, in_features], and returns its tensors by the end of
            their names.
    """

    name: str
    is_fp4: bool
    quantizes: Callable[[tuple[str, ...]], bool]
    tensors: Callable[[Shape], dict[str, Spec]]


def fp8_tensors(
    shape: Shape, strategy: str, block: list[int] | None, static_input: bool
) -> dict[str, Spec]:
    """Return the tensors of an FP8 module with one scale per tensor, output channel or block."""
    out_size, in_size = shape
    scales: dict[str, tuple[Shape, ...]] = {
        "tensor": ((), (1,)),
        "channel": ((out_size, 1), (out_size,)),
    }
    if block is not None:
        scales["block"] = ((ceil(out_size / block[0]), ceil(in_size / block[1])),)
    tensors: dict[str, Spec] = {
        "weight": ((FP8,), (shape,)),
        "weight_scale": (FLOATS, scales[strategy]),
    }
    return tensors | ({"input_scale": _ONE_NUMBER} if static_input else {})


def nvfp4_tensors(shape: Shape, names: tuple[str, str, str, str | None]) -> dict[str, Spec]:
    """Return the tensors of an NVFP4 module: weight, group scales, global scales (the input's if any)."""
    out_size, in_size = shape
    weight, group_scales, weight_scale, input_scale = names
    tensors: dict[str, Spec] = {
        weight: ((PACKED,), ((out_size, in_size // 2),)),
        group_scales: ((FP8,), ((out_size, in_size // GROUP_SIZE),)),
        weight_scale: _ONE_NUMBER,
    }
    return tensors | ({} if input_scale is None else {input_scale: _ONE_NUMBER})


def matches_compressed_tensors(entry: str, names: tuple[str, ...]) -> bool:
    """Return true if an entry of ``ignore`` or ``targets`` matches any of a module's names."""
    if entry.startswith("re:"):
        return any(re.match(entry.removeprefix("re:"), one) for one in names)
    return entry in names


def matches_modelopt(entry: str, names: tuple[str, ...]) -> bool:
    """Return true if an entry, a wildcard or a part of a name, matches a module, as in vLLM."""
    return any(fnmatch.fnmatch(one, entry) or entry.strip("*") in one for one in names)


def matches(method: str, entry: str, names: tuple[str, ...]) -> bool:
    """Return true if an entry of the ignore list of ``method`` matches any of a module's names."""
    if method == "compressed-tensors":
        return matches_compressed_tensors(entry, names)
    return matches_modelopt(entry, names)


def ignored_entries(settings: dict[str, Any]) -> list[str]:
    """Return the list of modules that a quantization config leaves unquantised."""
    inner = settings.get("quantization", settings)
    return list(inner.get("ignore") or inner.get("exclude_modules") or [])
