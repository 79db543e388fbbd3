"""The LoRA that comes with Nemotron-Labs-Diffusion for the drafts of ``linear_spec``: found and checked.

It is a folder of PEFT's beside the weights, and adapts each layer's ``o_proj``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.startup.checkpoint_file import checkpoint_file
from vllm_diffusion.weights.regular_files import json_object
from vllm_diffusion.weights.weight_files import (
    check_regular_files,
    check_weight_file,
    largest_magnitude,
    stored_tensors,
)

if TYPE_CHECKING:
    from vllm.config import ModelConfig

FOLDER = "linear_spec_lora"
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TENSOR_NAME = "base_model.model.encoder.layers.{layer}.self_attn.o_proj.lora_{half}.weight"
_FLOATS = ("F32", "F16", "BF16")
# What PEFT may say of an adapter that is more, or other, than two matrices a layer.
_UNSUPPORTED = (
    "use_dora",
    "use_rslora",
    "fan_in_fan_out",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layer_replication",
)
_ADVICE = f"copy or download {FOLDER} again, or remove it to draft with the plain weights"


@dataclass(frozen=True)
class DraftLora:
    """Checked adapter.

    Attributes:
        file: File of its tensors.
        rank: Rank of each pair of matrices.
        scale: Factor of their product.
    """

    file: Path
    rank: int
    scale: float


def find_draft_lora(model_config: ModelConfig) -> DraftLora | None:
    """The checkpoint's own, local or in a repository; ``None`` if it has none.

    Raises:
        ValueError: Naming the file and the key or tensor that is malformed, and the remedy.
    """
    check_regular_files(Path(model_config.model) / FOLDER)
    config_path = checkpoint_file(model_config, FOLDER, _CONFIG)
    if config_path is None:
        return None
    rank, scale = _read_config(config_path)
    weights = checkpoint_file(model_config, FOLDER, _WEIGHTS)
    if weights is None:
        raise ValueError(f"{config_path.parent} has no {_WEIGHTS}; {_ADVICE}.")
    check_weight_file(weights)
    _check_tensors(weights, model_config.hf_config, rank)
    return DraftLora(weights, rank, scale)


def _read_config(path: Path) -> tuple[int, float]:
    try:
        config = json_object(path)
    except ValueError as error:
        raise ValueError(f"{path} {error}; {_ADVICE}.") from None

    def check(key: str, fits: bool, what: str) -> None:
        if not fits:
            raise ValueError(f"{path}: {key}={config.get(key)!r} must be {what}; {_ADVICE}.")

    rank: Any = config.get("r")
    alpha: Any = config.get("lora_alpha")
    check("peft_type", config.get("peft_type") == "LORA", '"LORA"')
    check("target_modules", config.get("target_modules") in (["o_proj"], "o_proj"), '["o_proj"]')
    check("r", type(rank) is int and rank > 0, "an integer of at least 1")
    # JSON's 1e400 is read as infinity.
    is_alpha = type(alpha) in (int, float) and 0 < alpha < math.inf
    check("lora_alpha", is_alpha, "a finite number above 0")
    check("bias", config.get("bias", "none") == "none", '"none"')
    for key in _UNSUPPORTED:
        check(key, not config.get(key), "left out, false or empty")
    return rank, alpha / rank


def _check_tensors(path: Path, config: Any, rank: int) -> None:
    stored = {tensor.name: tensor for tensor in stored_tensors([path])}
    expected = {}
    for layer in range(config.num_hidden_layers):
        width = config.num_attention_heads * config.head_dim
        expected[TENSOR_NAME.format(layer=layer, half="A")] = (rank, width)
        expected[TENSOR_NAME.format(layer=layer, half="B")] = (config.hidden_size, rank)
    for name in stored:
        if name not in expected:
            raise ValueError(f"{name} in {path} belongs to no layer of the model; {_ADVICE}.")
    for name, shape in expected.items():
        if name not in stored:
            raise ValueError(f"{path} has no {name}; {_ADVICE}.")
        found = stored[name]
        if found.shape != shape or found.dtype not in _FLOATS:
            raise ValueError(
                f"{name} in {path} is {found.dtype} {list(found.shape)}, but must be "
                f"{' or '.join(_FLOATS)} {list(shape)}; {_ADVICE}."
            )
        if not math.isfinite(largest_magnitude(found)):
            raise ValueError(f"{name} in {path} holds numbers that are not finite; {_ADVICE}.")
