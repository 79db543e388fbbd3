"""Bytes that a forward pass must read, and how long the memory needs for them.

Counted once each: the weights of the text layers, of experts only those that some token chose; the
head, which is the embedding table; the self-conditioning module in a denoise step; and the keys and
values of the context, of a sliding layer those inside its window. Activations are left out (a
canvas of 256 rows is under 2 MB a tensor), and so is the vision tower.
"""

import math
import re
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from typing import Any

from vllm_diffusion.families.diffusion_gemma.startup import DiffusionGemmaTensors
from vllm_diffusion.weights.checkpoint_tensors import CheckpointTensors, Shape, split_experts

# A tensor's dtype, by safetensors' name, and its shape.
Spec = tuple[str, Shape]
# Published scales and everything else that is not quantised are BF16.
_BYTES = {"F8_E4M3": 1, "U8": 1, "BF16": 2}
# NVFP4 weights, their global scale and that of the inputs, by the tool that quantised.
_NVFP4_NAMES = {
    "modelopt": ("weight", "weight_scale_2", "input_scale"),
    "compressed-tensors": ("weight_packed", "weight_global_scale", "input_global_scale"),
}
# Each of a checkpoint's thousands of modules is compared with the same few entries.
_translate = cache(translate)


def expected_specs(
    shapes: dict[str, Shape], settings: dict[str, Any] | None, tensors: CheckpointTensors
) -> dict[str, Spec]:
    """Return dtype and shape of every tensor of a checkpoint, by canonical name.

    Args:
        shapes: Shapes without quantisation, of a quantised checkpoint with split experts.
        settings: Its quantization config, one of those in ``configs/``; ``None`` for BF16.
        tensors: Names of its tensors.
    """
    specs = {name: ("BF16", shape) for name, shape in shapes.items()}
    for name, shape in tensors.linear_modules(shapes).items() if settings else ():
        if is_quantized(tensors.all_names(name), settings["ignore"]):
            del specs[f"{name}.weight"]
            specs |= quantized_tensors(name, shape, settings)
    return specs


def is_quantized(names: tuple[str, ...], ignored: list[str]) -> bool:
    """Return true if no entry of an ignore list matches a module, which has all these names."""
    patterns = [one[3:] if one.startswith("re:") else _translate(one) for one in ignored]
    return not any(re.match(pattern, name) for name in names for pattern in patterns)


def quantized_tensors(name: str, shape: Shape, settings: dict[str, Any]) -> dict[str, Spec]:
    """Return the tensors of a quantised module.

    Args:
        name: The module.
        shape: [out_features, in_features].
        settings: As for :func:`expected_specs`.
    """
    out_size, in_size = shape
    (group,) = settings["config_groups"].values()
    if group["weights"]["num_bits"] == 8:
        scale = ("BF16", (out_size, 1))
        return {f"{name}.weight": ("F8_E4M3", shape), f"{name}.weight_scale": scale}
    weight, *global_scales = _NVFP4_NAMES[settings["quant_method"]]
    tensors = dict.fromkeys(global_scales[: 1 + ("input_activations" in group)], ("BF16", ()))
    tensors[weight] = ("U8", (out_size, in_size // 2))
    tensors["weight_scale"] = ("F8_E4M3", (out_size, in_size // 16))
    return {f"{name}.{end}": spec for end, spec in tensors.items()}


@dataclass(frozen=True)
class PassBytes:
    """What a pass reads, in bytes."""

    dense: int
    experts: int
    head: int
    self_conditioning: int
    kv_cache: int

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.head + self.self_conditioning + self.kv_cache


def pass_bytes(
    config: Any,
    quantization: dict[str, Any] | None,
    *,
    touched_experts: float,
    context: int,
    kv_bytes: int = 2,
    denoises: bool = True,
) -> PassBytes:
    """Bytes of one pass at batch size 1.

    Args:
        config: ``DiffusionGemmaConfig`` of the shape; autoregressive Gemma 4 of the same shape has
            the same text layers.
        quantization: The checkpoint's quantization config, ``None`` for BF16.
        touched_experts: Different experts that a layer's tokens chose, mean over layers.
        context: Tokens in the cache, and rows of the pass.
        kv_bytes: Bytes of a number in the cache.
        denoises: Whether self-conditioning runs.
    """
    sizes = {"dense": 0, "experts": 0, "head": 0, "self_conditioning": 0}
    tensors = DiffusionGemmaTensors()
    specs = expected_specs(split_experts(tensors.shapes(config)), quantization, tensors)
    for name, (dtype, shape) in specs.items():
        size = math.prod(shape) * _BYTES[dtype]
        if "embed_tokens" in name:
            sizes["head"] += size
        elif "self_conditioning" in name:
            sizes["self_conditioning"] += size * denoises
        elif re.search(r"\.experts\.\d+\.", name):
            sizes["experts"] += size
        elif name.startswith("model.decoder."):
            sizes["dense"] += size
    sizes["experts"] = round(sizes["experts"] * (touched_experts / config.text_config.num_experts))
    return PassBytes(**sizes, kv_cache=kv_cache_bytes(config.text_config, context, kv_bytes))


def kv_cache_bytes(text_config: Any, context: int, kv_bytes: int) -> int:
    """Keys and values that attention reads over ``context`` tokens."""
    total = 0
    for kind, shape in zip(text_config.layer_types, text_config.per_layer_config, strict=True):
        tokens = context if kind == "full_attention" else min(context, text_config.sliding_window)
        total += 2 * shape.num_key_value_heads * shape.head_dim * tokens * kv_bytes
    return total
