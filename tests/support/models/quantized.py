"""Quantized checkpoints for tests, and their values according to compressed-tensors.

The checkpoints come from ``examples/quantization/quantize.py``. The published NVFP4 checkpoint's
config is not known; the one made here, with weights and activations of every module that
FP8-dynamic quantizes, replaces it.
"""

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.models.checkpoints import SHIPPED, benchmark_config, copy_all_but_weights
from tests.support.oracles.oracle import Oracle

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@cache
def example(path: str) -> ModuleType:
    """Import an example script as a module, by its path below ``examples/`` without the ending."""
    name = Path(path).name
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{path}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def quantized_checkpoint(
    folder: Path, scheme: str, source: Path = SHIPPED, num_prompts: int = 6
) -> Path:
    """Return ``source`` under a scheme of ``examples/quantization/quantize.py``."""
    quantize = example("quantization/quantize")
    prompts = quantize.read_prompts(source, None, num_prompts)
    torch.manual_seed(0)
    quantize.quantize(source, folder, scheme, prompts if scheme in CALIBRATED else [], "cpu")
    return folder


CALIBRATED = ("fp8-static", "nvfp4")


def settings_of(preset: str, file_format: str, ignore: list[str]) -> QuantizationConfig:
    """Return compressed-tensors' settings of a preset for every linear layer but these."""
    return QuantizationConfig(
        config_groups={"group_0": preset_name_to_scheme(preset, ["Linear"])},
        ignore=ignore,
        format=file_format,
    )


def written(settings: QuantizationConfig) -> dict[str, Any]:
    """Return the settings as ``config.json`` has them."""
    settings.quantization_status = QuantizationStatus.COMPRESSED
    content: dict[str, Any] = settings.model_dump(mode="json", exclude_none=True)
    return content


class QuantizedOracle(Oracle):
    """``transformers``' model with a checkpoint's tensors, decompressed in ``dtype``.

    Activations are quantised and dequantised by compressed-tensors' own forward.
    """

    def __init__(self, checkpoint: Path, dtype: torch.dtype, source: Path = SHIPPED) -> None:
        """Load what was quantised from a checkpoint, and what was not from its source."""
        settings = json.loads((checkpoint / "config.json").read_text())["quantization_config"]
        settings.pop("version")
        super().__init__(source, dtype)
        example("quantization/quantize").share_modules(self.model)
        apply_quantization_config(self.model, QuantizationConfig(**settings))
        tensors = load_file(checkpoint / "model.safetensors")
        for name, module in self.model.named_modules():
            if hasattr(module, "quantization_scheme"):
                stored = name.replace("model.encoder.language_model.", "model.decoder.")
                _load(module, stored, tensors, dtype)
                module.quantization_status = QuantizationStatus.COMPRESSED


def _load(
    module: nn.Module, name: str, tensors: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    scale = tensors[f"{name}.weight_scale"].to(dtype)
    if f"{name}.weight" in tensors:
        weight = tensors[f"{name}.weight"].to(dtype) * scale
    else:
        weight = unpacked(tensors[f"{name}.weight_packed"]).to(dtype)
        weight = weight * scale.repeat_interleave(16, dim=-1)
        weight = weight / tensors[f"{name}.weight_global_scale"].to(dtype)
    module.weight = nn.Parameter(weight, requires_grad=False)
    for scale_name in ("input_global_scale", "input_scale"):
        if f"{name}.{scale_name}" in tensors:
            value = tensors[f"{name}.{scale_name}"].to(dtype)
            setattr(module, scale_name, nn.Parameter(value, requires_grad=False))


def unpacked(packed: torch.Tensor) -> torch.Tensor:
    """Return compressed-tensors' reading of packed E2M1 numbers, float32."""
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

    return unpack_fp4_from_uint8(packed, packed.shape[0], packed.shape[1] * 2, torch.float32)


def modelopt_checkpoint(source: Path, folder: Path) -> Path:
    """The layout of the published modelopt NVFP4 checkpoint: experts only, FP8 KV cache, BF16.

    Written by hand from an NVFP4 checkpoint of ``examples/quantization/quantize.py``, since
    modelopt itself needs a GPU; names and config are as far as they are known, not compared with
    the published ones.
    """
    copy_all_but_weights(source, folder)
    experts = load_file(source / "model.safetensors")
    tensors = {}
    for name, tensor in load_file(SHIPPED / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = tensor.bfloat16()
    for name, tensor in experts.items():
        if ".experts." not in name:
            continue
        stem, _, end = name.rpartition(".")
        if end.endswith("global_scale"):
            # compressed-tensors stores the inverse.
            new = "weight_scale_2" if end.startswith("weight") else "input_scale"
            tensors[f"{stem}.{new}"] = 1 / tensor.reshape(())
        else:
            tensors[f"{stem}.{end.removesuffix('_packed')}"] = tensor
    # One layer with scales for its cache, the others without.
    attention = "model.decoder.layers.0.self_attn"
    tensors[f"{attention}.k_proj.k_scale"] = torch.tensor(0.05)
    tensors[f"{attention}.v_proj.v_scale"] = torch.tensor(0.02)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    config = json.loads((source / "config.json").read_text())
    config["dtype"] = config["text_config"]["dtype"] = "bfloat16"
    config["quantization_config"] = benchmark_config("nvfp4-modelopt")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def block_checkpoint(source: Path, folder: Path, method: str, block: int = 64) -> Path:
    """An FP8 checkpoint with a scale for each block of weights, as DeepSeek's and llm-compressor's
    are.

    Args:
        source: A checkpoint of the scheme fp8-dynamic.
        folder: Where to put it.
        method: ``"fp8"`` or ``"compressed-tensors"``.
        block: Rows and columns of a block.
    """
    copy_all_but_weights(source, folder)
    old = load_file(source / "model.safetensors")
    tensors = {name: tensor for name, tensor in old.items() if not name.endswith(".weight_scale")}
    end = "weight_scale_inv" if method == "fp8" else "weight_scale"
    for name in [name for name in old if name.endswith(".weight_scale")]:
        stem = name.removesuffix(".weight_scale")
        weight = old[f"{stem}.weight"].float() * old[name].float()
        tiles = weight.unflatten(1, (-1, block)).unflatten(0, (-1, block))
        scales = tiles.abs().amax((1, 3)) / 448
        tensors[f"{stem}.weight"] = (
            (tiles / scales[:, None, :, None]).flatten(2, 3).flatten(0, 1).to(torch.float8_e4m3fn)
        )
        tensors[f"{stem}.{end}"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    settings = config["quantization_config"]
    if method == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [block, block],
            "modules_to_not_convert": settings["ignore"],
        }
    else:
        group = settings["config_groups"]["group_0"]
        group["weights"] |= {"strategy": "block", "block_structure": [block, block]}
        group["input_activations"] |= {"strategy": "group", "group_size": block}
    (folder / "config.json").write_text(json.dumps(config))
    return folder
