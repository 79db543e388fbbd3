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
# What shares a scale of FP8 weights.
FP8_STRATEGIES = ("tensor", "channel", "block")

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
    # The keys are FP8_STRATEGIES.
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
    """Return the tensors of an NVFP4 module: weight, group scales, global scales (the input's if
    any).
    """
    out_size, in_size = shape
    weight, group_scales, weight_scale, input_scale = names
    tensors: dict[str, Spec] = {
        weight: ((PACKED,), ((out_size, in_size // 2),)),
        group_scales: ((FP8,), ((out_size, in_size // GROUP_SIZE),)),
        weight_scale: _ONE_NUMBER,
    }
    return tensors | ({} if input_scale is None else {input_scale: _ONE_NUMBER})


def matches(method: str, entry: str, names: tuple[str, ...]) -> bool:
    """Return true if an entry of the lists of ``method`` matches any of a module's names, as in
    vLLM.

    Modelopt's are wildcards or parts of a name.
    """
    if method != "compressed-tensors":
        return any(fnmatch.fnmatch(one, entry) or entry.strip("*") in one for one in names)
    if entry.startswith("re:"):
        return any(re.match(entry.removeprefix("re:"), one) for one in names)
    return entry in names


def ignored_entries(settings: dict[str, Any]) -> list[str]:
    """Return the list of modules that a quantization config leaves unquantised.

    Raises:
        ValueError: If it is not a list of names and patterns.
    """
    inner, where = _modelopt_section(settings)
    name = "ignore" if inner.get("ignore") else "exclude_modules"
    return _names(f"{where}{name}", inner.get(name) or [])


def read_format(settings: dict[str, Any]) -> Format | None:
    """Read a quantization config.

    Args:
        settings: ``quantization_config`` of ``config.json``, or ``hf_quant_config.json``.

    Returns:
        The format; ``None`` if its tensors are not known here: vLLM loads it unchecked.

    Raises:
        ValueError: If a field has a value that is not served, in one sentence that names it.
    """
    method = str(settings.get("quant_method", "")).lower()
    if method == "compressed-tensors":
        return _read_compressed_tensors(settings)
    if method.startswith("modelopt"):
        return _read_modelopt(settings)
    return None


# Methods whose numbers are integers or MXFP4, whatever else their settings say.
_WITHOUT_EMULATION = ("awq", "fp_quant", "gptq", "mxfp4")


def without_emulation(settings: dict[str, Any]) -> str | None:
    """Return the name of a format that the CPU platform has no arithmetic for, or ``None`` if none
    is known.

    Args:
        settings: As for :func:`read_format`, which has found no fault in them.
    """
    method = str(settings.get("quant_method", "")).lower()
    if method.startswith("modelopt"):
        inner, _ = _modelopt_section(settings)
        algorithm = str(inner.get("quant_algo", "")).upper()
        return f"{method} {algorithm}" if "MX" in algorithm else None
    has_integers = method == "auto-round" and settings.get("data_type", "int") == "int"
    if method in _WITHOUT_EMULATION or has_integers:
        return method
    if method != "compressed-tensors":
        return None
    for group in (settings.get("config_groups") or {}).values():
        weights, name = group.get("weights"), str(group.get("format") or settings.get("format"))
        if weights is not None and (weights.get("type") != "float" or name.startswith("mx")):
            return name
    return None


def _read_compressed_tensors(settings: dict[str, Any]) -> Format | None:
    from compressed_tensors import CompressionFormat

    known = sorted(one.value for one in CompressionFormat)
    for field, default in (("config_groups", {}), ("ignore", [])):
        # vLLM reads these two where they are there.
        if settings.get(field, default) is None:
            raise _misfit(field, None, "left out, or have a value")
    _mapping("kv_cache_scheme", settings.get("kv_cache_scheme"))
    groups = _mapping("config_groups", settings.get("config_groups"))
    formats = set()
    for key, group in groups.items():
        group = _mapping(f"config_groups.{key}", group)
        own = group.get("format")
        name = settings.get("format") if own is None else own
        if name not in known:
            # vLLM would find in the engine's process that it has no scheme for the layers.
            field = "format" if own is None else f"config_groups.{key}.format"
            raise _misfit(field, name, f"one of {', '.join(known)}")
        formats.add(name)
        _names(f"config_groups.{key}.targets", group.get("targets"))
    # Groups with formats of their own are left to vLLM.
    if len(groups) != 1 or len(formats) != 1:
        return None
    ((key, group),), (name,) = groups.items(), formats
    weights = _arguments(f"config_groups.{key}.weights", group.get("weights"))
    inputs = None
    if group.get("input_activations") is not None:
        where = f"config_groups.{key}.input_activations"
        inputs = _arguments(where, group["input_activations"])
    ignored, targets = ignored_entries(settings), group["targets"]

    def quantizes(names: tuple[str, ...]) -> bool:
        return not any(matches("compressed-tensors", entry, names) for entry in ignored) and any(
            target == "Linear" or matches("compressed-tensors", target, names) for target in targets
        )

    if weights.type != "float":
        return None
    if name == "nvfp4-pack-quantized" and weights.group_size == GROUP_SIZE:
        input_scale = "input_global_scale" if inputs else None
        names = ("weight_packed", "weight_scale", "weight_global_scale", input_scale)
        return Format(name, True, quantizes, partial(nvfp4_tensors, names=names))
    if name in ("float-quantized", "naive-quantized") and weights.num_bits == 8:
        block = weights.block_structure
        if weights.strategy not in FP8_STRATEGIES:
            field = f"config_groups.{key}.weights.strategy"
            raise _misfit(field, weights.strategy, f"{' or '.join(FP8_STRATEGIES)} for FP8 weights")
        if block is not None and (len(block) != 2 or min(block) < 1):
            field = f"config_groups.{key}.weights.block_structure"
            raise _misfit(field, block, "two numbers of at least 1, rows and columns of a block")
        return Format(
            name,
            False,
            quantizes,
            partial(
                fp8_tensors,
                strategy=weights.strategy,
                block=block,
                static_input=inputs is not None and not inputs.dynamic,
            ),
        )
    return None


def _arguments(where: str, value: Any) -> Any:
    """Parse how weights or activations are quantised, as vLLM does; return ``QuantizationArgs``."""
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationStrategy,
        QuantizationType,
    )
    from pydantic import ValidationError

    choices = {"strategy": QuantizationStrategy, "type": QuantizationType}
    try:
        return QuantizationArgs.model_validate(_mapping(where, value))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join([where, *map(str, first["loc"])])
        reason = _first_line(first["msg"]).removeprefix("Value error, ")
        if (kind := choices.get(str(first["loc"][:1] and first["loc"][0]))) is not None:
            known = " or ".join(f'"{one.value}"' for one in kind)
            raise _misfit(field, first["input"], known) from None
        raise _refused(
            field, first["input"], f"is refused by compressed-tensors ({reason})"
        ) from None
    except (TypeError, AttributeError, NotImplementedError) as error:
        # Its validators compare and count before they look at the type.
        raise _refused(
            where, value, f"is refused by compressed-tensors ({_first_line(error)})"
        ) from None


def _first_line(message: object) -> str:
    return next(iter(str(message).splitlines()), "")


def _mapping(name: str, value: Any) -> dict[str, Any]:
    """Return an object's fields; ``None`` has none."""
    if value is not None and not isinstance(value, dict):
        raise _misfit(name, value, "an object")
    return value or {}


def _names(name: str, value: Any) -> list[str]:
    """Return a list of names and patterns, after a check that they are."""
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise _misfit(name, value, "a list of names and patterns of modules")
    for entry in value:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise _refused(name, entry, f"is not a regular expression ({error})") from None
    return value


def _misfit(name: str, value: object, allowed: str) -> ValueError:
    return _refused(name, value, f"must be {allowed}")


def _refused(name: str, value: object, reason: str) -> ValueError:
    return ValueError(
        f"{name}={value!r} in quantization_config of the checkpoint {reason}; correct it, or quantise "
        "the checkpoint again."
    )


def _modelopt_section(settings: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the fields of modelopt's own file or of ``config.json``, and what precedes their
    names.
    """
    if "quantization" in settings:
        return _mapping("quantization", settings["quantization"]), "quantization."
    return settings, ""


def _read_modelopt(settings: dict[str, Any]) -> Format | None:
    inner, where = _modelopt_section(settings)
    algorithm = str(inner.get("quant_algo", "")).upper()
    ignored = ignored_entries(settings)

    def quantizes(names: tuple[str, ...]) -> bool:
        # vLLM never quantises a vision tower under modelopt.
        return not any("vision_tower" in name for name in names) and not any(
            matches("modelopt", entry, names) for entry in ignored
        )

    if algorithm in ("NVFP4", "W4A16_NVFP4"):
        groups = [
            _mapping(f"{where}config_groups.{key}", group)
            for key, group in _mapping(f"{where}config_groups", inner.get("config_groups")).items()
        ]
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
