"""Names and shapes of an unquantised checkpoint, as ``transformers`` would write it.

Encoder and decoder share their text layers. A checkpoint stores what they share once, under either
one's name; here it has the decoder's. Only ``layer_scalar`` is stored for both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

ENCODER = "model.encoder.language_model."
DECODER = "model.decoder."
_EXPERT = re.compile(r"(.*\.experts)\.\d+\.(gate_proj|up_proj|down_proj)(?:\..*)?$")

Shape = tuple[int, ...]


def canonical_name(name: str) -> str:
    """A tensor's or module's name with what the encoder shares under the decoder's name."""
    if name.startswith(ENCODER) and not name.endswith(".layer_scalar"):
        return DECODER + name.removeprefix(ENCODER)
    return name


def both_names(name: str) -> tuple[str, ...]:
    """A module's name, and its name in the encoder where it is shared."""
    if name.startswith(DECODER) and "self_conditioning" not in name:
        return name, ENCODER + name.removeprefix(DECODER)
    return (name,)


def tensor_shapes(config: Any) -> dict[str, Shape]:
    """Canonical name to shape of every tensor; experts are fused, as in the BF16 checkpoint.

    Args:
        config: The checkpoint's ``DiffusionGemmaConfig``.
    """
    from transformers import DiffusionGemmaForBlockDiffusion

    with torch.device("meta"):
        model = DiffusionGemmaForBlockDiffusion(config)
    shapes = {canonical_name(name): tuple(t.shape) for name, t in model.state_dict().items()}
    if config.tie_word_embeddings:
        del shapes["lm_head.weight"]
    size = getattr(config, "self_conditioning_size", None)
    if size is not None:
        hidden = config.text_config.hidden_size
        for name in ("gate_proj", "up_proj", "down_proj"):
            shape = (hidden, size) if name == "down_proj" else (size, hidden)
            shapes[f"{DECODER}self_conditioning.{name}.weight"] = shape
    return shapes


def split_experts(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """The same with a matrix for each expert in place of the fused ones."""
    split: dict[str, Shape] = {}
    for name, shape in shapes.items():
        if name.endswith(".experts.gate_up_proj"):
            num_experts, twice, hidden = shape
            half: Shape = (twice // 2, hidden)
            parts = {"gate_proj": half, "up_proj": half}
        elif name.endswith(".experts.down_proj"):
            num_experts, parts = shape[0], {"down_proj": shape[1:]}
        else:
            split[name] = shape
            continue
        stem = name.rpartition(".")[0]
        for idx in range(num_experts):
            for part, size in parts.items():
                split[f"{stem}.{idx}.{part}.weight"] = size
    return split


def linear_modules(shapes: dict[str, Shape]) -> dict[str, Shape]:
    """Canonical name to [out_features, in_features] of the modules that vLLM can quantise.

    The routers and the embeddings stay as they are in every format.

    Args:
        shapes: With split experts.
    """
    return {
        name.removesuffix(".weight"): shape
        for name, shape in shapes.items()
        if name.endswith(".weight")
        and len(shape) == 2
        and not name.endswith(("embed_tokens.weight", "router.proj.weight"))
    }


def module_names(shapes: dict[str, Shape]) -> set[str]:
    """Every name that an entry of an ignore list may mean: modules and their parents."""
    names = {"lm_head"}
    for tensor in shapes:
        for name in both_names(tensor):
            parts = name.split(".")
            names.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return names


def has_split_experts(names: Iterable[str]) -> bool:
    """Whether any of these names belongs to a single expert."""
    return any(_EXPERT.match(name) for name in names)
