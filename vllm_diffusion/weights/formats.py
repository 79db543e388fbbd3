"""Quantised formats: what a checkpoint's config says of them, and what runs them."""

import re
from collections import Counter
from typing import Any

# Numbers that share a scale in NVFP4.
GROUP_SIZE = 16
# Dtypes of numbers that are not quantised, by safetensors' names.
FLOATS = ("F64", "F32", "F16", "BF16")
# What shares a scale of FP8 weights.
FP8_STRATEGIES = ("tensor", "channel", "block")


def read_format(settings: dict[str, Any]) -> str | None:
    """Check a quantization config, and tell whether its weights are NVFP4.

    Args:
        settings: ``quantization_config`` of ``config.json``, or ``hf_quant_config.json``.

    Returns:
        The name that the config has for NVFP4; ``None`` for any other format, and for one that is
        not known here, which vLLM loads unchecked.

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


def _read_compressed_tensors(settings: dict[str, Any]) -> str | None:
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
        _check_names(f"config_groups.{key}.targets", group.get("targets"))
    # Groups with formats of their own are left to vLLM.
    if len(groups) != 1 or len(formats) != 1:
        return None
    ((key, group),), (name,) = groups.items(), formats
    weights = _arguments(f"config_groups.{key}.weights", group.get("weights"))
    if group.get("input_activations") is not None:
        _arguments(f"config_groups.{key}.input_activations", group["input_activations"])
    _check_ignored(settings)
    if weights.type != "float":
        return None
    if name == "nvfp4-pack-quantized" and weights.group_size == GROUP_SIZE:
        return str(name)
    if name in ("float-quantized", "naive-quantized") and weights.num_bits == 8:
        block = weights.block_structure
        if weights.strategy not in FP8_STRATEGIES:
            field = f"config_groups.{key}.weights.strategy"
            raise _misfit(field, weights.strategy, f"{' or '.join(FP8_STRATEGIES)} for FP8 weights")
        if block is not None and (len(block) != 2 or min(block) < 1):
            field = f"config_groups.{key}.weights.block_structure"
            raise _misfit(field, block, "two numbers of at least 1, rows and columns of a block")
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


def _check_names(name: str, value: Any) -> None:
    """Refuse what is not a list of names and patterns."""
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise _misfit(name, value, "a list of names and patterns of modules")
    for entry in value:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise _refused(name, entry, f"is not a regular expression ({error})") from None


def _check_ignored(settings: dict[str, Any]) -> None:
    """Refuse a list of unquantised modules that is not one of names and patterns."""
    inner, where = _modelopt_section(settings)
    name = "ignore" if inner.get("ignore") else "exclude_modules"
    _check_names(f"{where}{name}", inner.get(name) or [])


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


def _read_modelopt(settings: dict[str, Any]) -> str | None:
    inner, where = _modelopt_section(settings)
    algorithm = str(inner.get("quant_algo", "")).upper()
    _check_ignored(settings)
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        return None
    groups = _mapping(f"{where}config_groups", inner.get("config_groups"))
    for key, group in groups.items():
        _mapping(f"{where}config_groups.{key}", group)
    return algorithm


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
