"""Checkpoints with integer weights, in the layouts of compressed-tensors, GPTQ, AutoRound and AWQ.

Those of compressed-tensors are packed by its own code. Of the others the values are drawn: what is
tried is which tensors a layout has, and of which shapes and types.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import compress_module
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.support.models.checkpoints import copy_all_but_weights, with_single_experts
from tests.support.models.quantized import settings_of, written

GROUP_SIZE = 32
# compressed-tensors' presets, and the layout that each is stored in.
PRESETS = {
    "W4A16": "pack-quantized",
    "W4A16_ASYM": "pack-quantized",
    "W8A16": "pack-quantized",
    "W8A8": "int-quantized",
}
LAYOUTS = (*PRESETS, "gptq", "auto-round", "awq")
# Matrices that recipes leave as they are.
_KEPT = re.compile(
    r"router|vision|embed|self_conditioning|lm_head|mlp\.gate\.|wte|transformer\.ff_out|diffusion_head"
)


def integer_checkpoint(source: Path, folder: Path, layout: str) -> Path:
    """Write a checkpoint with the matrices of all layers, and of each expert, as integers.

    Args:
        source: A checkpoint in floats.
        folder: Where to put it.
        layout: One of :data:`LAYOUTS`.
    """
    copy_all_but_weights(source, folder)
    tensors: dict[str, Tensor] = {}
    kept = []
    for name, tensor in with_single_experts(load_file(source / "model.safetensors")).items():
        stem = name.removesuffix(".weight")
        if tensor.dim() == 2 and stem != name and not _KEPT.search(name):
            stored = _stored(tensor, layout)
            tensors |= {f"{stem}.{end}": value for end, value in stored.items()}
            continue
        tensors[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
        if tensor.dim() == 2 and stem != name:
            kept.append(stem)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for section in (config, config.get("text_config", config)):
        section["dtype"] = "bfloat16"
    config["quantization_config"] = quantization_config(layout, kept)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _stored(weight: Tensor, layout: str) -> dict[str, Tensor]:
    """Return the tensors of a matrix [out_features, in_features], by the ends of their names."""
    if layout in PRESETS:
        return _compressed(weight, layout)
    out_size, in_size = weight.shape
    groups = in_size // GROUP_SIZE
    scales = {"scales": torch.rand(groups, out_size).half() / 100}
    if layout == "awq":
        return scales | {
            "qweight": _drawn(in_size, out_size // 8),
            "qzeros": _drawn(groups, out_size // 8),
        }
    return scales | {
        "qweight": _drawn(in_size // 8, out_size),
        "qzeros": _drawn(groups, out_size // 8),
        "g_idx": (torch.arange(in_size) // GROUP_SIZE).int(),
    }


def _drawn(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def _settings(preset: str, kept: list[str]) -> QuantizationConfig:
    settings = settings_of(preset, PRESETS[preset], kept)
    weights = settings.config_groups["group_0"].weights
    if weights.group_size is not None:
        weights.group_size = GROUP_SIZE
    return settings


def _compressed(weight: Tensor, preset: str) -> dict[str, Tensor]:
    model = nn.Sequential(nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    linear: Any = model[0]
    linear.weight.data.copy_(weight)
    apply_quantization_config(model, _settings(preset, []))
    arguments = linear.quantization_scheme.weights
    groups = weight.float().unflatten(-1, (-1, arguments.group_size or weight.shape[1]))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), arguments)
    linear.weight_scale = nn.Parameter(scale.bfloat16(), requires_grad=False)
    if not arguments.symmetric:
        linear.weight_zero_point = nn.Parameter(zero_point, requires_grad=False)
    compress_module(linear)
    return {name: value.contiguous() for name, value in linear.state_dict().items()}


def quantization_config(layout: str, kept: list[str]) -> dict[str, Any]:
    """Return ``config.json``'s part for a layout, with the modules that are not quantized."""
    if layout in PRESETS:
        return written(_settings(layout, kept))
    numbers = {"bits": 4, "group_size": GROUP_SIZE}
    if layout == "awq":
        named = {"zero_point": True, "version": "gemm", "modules_to_not_convert": kept}
        return {"quant_method": "awq"} | numbers | named
    numbers |= {"sym": True}
    if layout == "gptq":
        return {"quant_method": "gptq", "desc_act": False, "checkpoint_format": "gptq"} | numbers
    return numbers | {
        "quant_method": "auto-round",
        "data_type": "int",
        "packing_format": "auto_round:auto_gptq",
        "extra_config": {name: {"bits": 16, "data_type": "fp"} for name in kept},
    }
