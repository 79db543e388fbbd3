"""Reader of a checkpoint's ``quantization_config``, as a :class:`Format` or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from vllm_diffusion.weights.formats import (
    GROUP_SIZE,
    Format,
    fp8_tensors,
    ignored_entries,
    matches,
    matches_compressed_tensors,
    nvfp4_tensors,
)

_COMPRESSED_NVFP4 = (
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
)
_MODELOPT_NVFP4 = ("weight", "weight_scale", "weight_scale_2", "input_scale")


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
        return not any(matches_compressed_tensors(entry, names) for entry in ignored) and any(
            target == "Linear" or matches_compressed_tensors(target, names) for target in targets
        )

    if weights.get("type") != "float":
        return None
    if name == "nvfp4-pack-quantized" and weights.get("group_size") == GROUP_SIZE:
        names = _COMPRESSED_NVFP4[:3] + ((_COMPRESSED_NVFP4[3] if inputs else None),)
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
        names: tuple[str, str, str, str | None] = _MODELOPT_NVFP4
        if algorithm == "W4A16_NVFP4" or _weights_only(inner):
            names = (*_MODELOPT_NVFP4[:3], None)
        return Format(algorithm, True, quantizes, partial(nvfp4_tensors, names=names))
    if algorithm == "FP8":
        tensors: Callable[..., Any] = partial(
            fp8_tensors, strategy="tensor", block=None, static_input=True
        )
        return Format(algorithm, False, quantizes, tensors)
    return None


def _weights_only(settings: dict[str, Any]) -> bool:
    groups = (settings.get("config_groups") or {}).values()
    return bool(groups) and all(group.get("input_activations") is None for group in groups)
