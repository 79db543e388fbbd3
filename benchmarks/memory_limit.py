"""Bytes that a forward pass must read, and how long the memory needs for them.

Counted once each: the weights of the text layers, of experts only those that some token chose; the
head, which is the embedding table; the self-conditioning module in a denoise step; and the keys and
values of the context, of a sliding layer those inside its window. Activations are left out (a
canvas of 256 rows is under 2 MB a tensor), and so is the vision tower.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from vllm_diffusion.families.diffusion_gemma.startup import DiffusionGemmaTensors
from vllm_diffusion.weights.formats import FLOATS, Format, Spec, read_format
from vllm_diffusion.weights.tensor_rules import Shape, TensorRules, split_experts

_BYTES = {"F8_E4M3": 1, "U8": 1}
# Published scales and everything else that is not quantised.
_OTHER_BYTES = 2
_EXPERT = re.compile(r"\.experts\.\d+\.")


def expected_specs(
    shapes: dict[str, Shape], quantized: Format | None, rules: TensorRules
) -> dict[str, Spec]:
    """Return the allowed dtypes and shapes of every tensor of a checkpoint, by canonical name."""
    specs: dict[str, Spec] = {name: (FLOATS, (shape,)) for name, shape in shapes.items()}
    if quantized is None:
        return specs
    for name, shape in rules.linear_modules(shapes).items():
        if quantized.quantizes(rules.all_names(name)):
            del specs[f"{name}.weight"]
            specs |= {f"{name}.{end}": spec for end, spec in quantized.tensors(shape).items()}
    return specs


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
    quantized = None if quantization is None else read_format(quantization)
    sizes = {"dense": 0, "experts": 0, "head": 0, "self_conditioning": 0}
    rules = DiffusionGemmaTensors()
    specs = expected_specs(split_experts(rules.shapes(config)), quantized, rules)
    for name, (dtypes, shapes) in specs.items():
        size = math.prod(shapes[0]) * _BYTES.get(dtypes[0], _OTHER_BYTES)
        if "embed_tokens" in name:
            sizes["head"] += size
        elif "self_conditioning" in name:
            sizes["self_conditioning"] += size * denoises
        elif _EXPERT.search(name):
            sizes["experts"] += size
        elif name.startswith("model.decoder."):
            sizes["dense"] += size
    share = touched_experts / config.text_config.num_experts
    sizes["experts"] = round(sizes["experts"] * share)
    return PassBytes(**sizes, kv_cache=kv_cache_bytes(config.text_config, context, kv_bytes))


def kv_cache_bytes(text_config: Any, context: int, kv_bytes: int) -> int:
    """Keys and values that attention reads over ``context`` tokens."""
    total = 0
    for layer, kind in enumerate(text_config.layer_types):
        shape = text_config.per_layer_config[layer]
        is_full = kind == "full_attention"
        tokens = context if is_full else min(context, text_config.sliding_window)
        total += 2 * shape.num_key_value_heads * shape.head_dim * tokens * kv_bytes
    return total
