"""The adapter with which Nemotron-Labs' own model drafts, stored next to its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.weights.adapters.support import (
    CONFIG,
    WEIGHTS,
    AdapterSupport,
    Module,
    read_config,
    read_pairs,
)
from vllm_diffusion.weights.weight_files import checkpoint_file

if TYPE_CHECKING:
    from vllm.config import ModelConfig


FOLDER = "linear_spec_lora"
_MODULE = "encoder.layers.{layer}.self_attn.o_proj"
TENSOR_NAME = f"base_model.model.{_MODULE}.lora_{{half}}.weight"
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
        ValueError: If it is not an adapter of this kind for this model.
    """
    path = checkpoint_file(model_config, FOLDER, CONFIG)
    if path is None:
        return None
    # One file of a repository is fetched at a time.
    checkpoint_file(model_config, FOLDER, WEIGHTS)
    config, folder = model_config.hf_config, path.parent
    module = Module(config.hidden_size, config.num_attention_heads * config.head_dim)
    modules = {_MODULE.format(layer=layer): module for layer in range(config.num_hidden_layers)}
    try:
        AdapterSupport(modules, max_rank=config.hidden_size).check(str(folder))
    except ValueError as error:
        raise ValueError(f"{error} For drafts, {_ADVICE}.") from None
    if missing := modules.keys() - read_pairs(folder).keys():
        raise ValueError(f"{folder / WEIGHTS} has nothing for {min(missing)}; {_ADVICE}.")
    settings = read_config(folder)
    kinds = {settings.get_rank_and_scaling(name) for name in modules}
    if len(kinds) > 1:
        raise ValueError(f"{path}: rank_pattern and alpha_pattern must be left out; {_ADVICE}.")
    return DraftLora(folder / WEIGHTS, *kinds.pop())
