"""Quantised formats: the tensors of a module, for each that can be checked, and what runs them."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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


def matches(method: str, entry: str, names: tuple[str, ...]) -> bool:
    """Return true if an entry of the lists of ``method`` matches any of a module's names, as in vLLM.

    Modelopt's are wildcards or parts of a name.
    """
    if method != "compressed-tensors":
        return any(fnmatch.fnmatch(one, entry) or entry.strip("*") in one for one in names)
    if entry.startswith("re:"):
        return any(re.match(entry.removeprefix("re:"), one) for one in names)
    return entry in names


def ignored_entries(settings: dict[str, Any]) -> list[str]:
    """Return the list of modules that a quantization config leaves unquantised."""
    inner = settings.get("quantization", settings)
    return list(inner.get("ignore") or inner.get("exclude_modules") or [])


def read_format(settings: dict[str, Any]) -> Format | None:
    """Read a quantization config.

    Args:
        settings: ``quantization_config`` of ``config.json``, or ``hf_quant_config.json``.

    Returns:
        The format; ``None`` if its tensors are not known here: vLLM loads it unchecked.

    Raises:
        ValueError: If the format or its version is unknown, in one sentence.
    """
    method = str(settings.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        return _read_compressed_tensors(settings)
    if method.startswith("modelopt"):
        return _read_modelopt(settings)
    return None


def _read_compressed_tensors(settings: dict[str, Any]) -> Format | None:
    from compressed_tensors import CompressionFormat

    _check_version(str(settings.get("version", "0")))
    known = sorted(one.value for one in CompressionFormat)
    groups = list((settings.get("config_groups") or {}).values())
    formats = {str(group.get("format") or settings.get("format")) for group in groups}
    for name in formats:
        if name not in known:
            raise ValueError(
                f"format={name!r} in quantization_config of the checkpoint's config.json is "
                f"unknown; compressed-tensors knows {', '.join(known)}."
            )
    # Groups with formats of their own are left to vLLM.
    if len(groups) != 1 or len(formats) != 1:
        return None
    (group,), (name,) = groups, formats
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    ignored, targets = ignored_entries(settings), group.get("targets") or []

    def quantizes(names: tuple[str, ...]) -> bool:
        return not any(matches("compressed-tensors", entry, names) for entry in ignored) and any(
            target == "Linear" or matches("compressed-tensors", target, names) for target in targets
        )

    if weights.get("type") != "float":
        return None
    if name == "nvfp4-pack-quantized" and weights.get("group_size") == GROUP_SIZE:
        input_scale = "input_global_scale" if inputs else None
        names = ("weight_packed", "weight_scale", "weight_global_scale", input_scale)
        return Format(name, True, quantizes, partial(nvfp4_tensors, names=names))
    if name in ("float-quantized", "naive-quantized") and weights.get("num_bits") == 8:
        return Format(
            name,
            False,
            quantizes,
            partial(
                fp8_tensors,
                strategy=weights.get("strategy", "tensor"),
                block=weights.get("block_structure"),
                static_input=bool(inputs) and not inputs.get("dynamic"),
            ),
        )
    return None


def _check_version(version: str) -> None:
    from compressed_tensors import __version__ as installed
    from packaging.version import InvalidVersion, Version

    try:
        parsed = Version(version)
    except InvalidVersion:
        raise ValueError(
            f"version={version!r} in quantization_config of the checkpoint's config.json is not a "
            "version of compressed-tensors."
        ) from None
    if parsed.release[:2] > Version(installed).release[:2]:
        raise ValueError(
            f"The checkpoint was written by compressed-tensors {version}, which is newer than "
            f"{installed}, the one that this vLLM reads; install a newer vLLM, or quantise the "
            f"checkpoint with compressed-tensors {installed}."
        )


def _read_modelopt(settings: dict[str, Any]) -> Format | None:
    inner = settings.get("quantization", settings)
    algorithm = str(inner.get("quant_algo", "")).upper()
    ignored = ignored_entries(settings)

    def quantizes(names: tuple[str, ...]) -> bool:
        # vLLM never quantises a vision tower under modelopt.
        return not any("vision_tower" in name for name in names) and not any(
            matches("modelopt", entry, names) for entry in ignored
        )

    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        groups = (inner.get("config_groups") or {}).values()
        is_weights_only = groups and all(one.get("input_activations") is None for one in groups)
        input_scale = None if algorithm == "W4A16_NVFP4" or is_weights_only else "input_scale"
        names = ("weight", "weight_scale", "weight_scale_2", input_scale)
        return Format(algorithm, True, quantizes, partial(nvfp4_tensors, names=names))
    if algorithm == "FP8":
        return Format(
            algorithm,
            False,
            quantizes,
            partial(fp8_tensors, strategy="tensor", block=None, static_input=True),
        )
    return None


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
