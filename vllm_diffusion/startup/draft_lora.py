"""The LoRA with which a model drafts for itself (rule ``linear_spec``): found and checked before a
weight is read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.startup.plan import spec_of
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

logger = logging.getLogger("vllm.vllm_diffusion")


@dataclass(frozen=True)
class DraftLora:
    """Checked adapter.

    Attributes:
        file: File of its tensors.
        modules: Published names of the modules that it adapts.
        rank: Rank of each pair of matrices.
        scale: Factor of their product.
    """

    file: Path
    modules: tuple[str, ...]
    rank: int
    scale: float


def look_for_draft_lora(
    model_config: ModelConfig,
    folder: str,
    modules: Mapping[str, Module],
    *,
    adapts_all: bool = False,
) -> DraftLora | None:
    """The one of ``draft_adapter``, or of the checkpoint, local or in a repository; ``None`` if
    there is none.

    Args:
        model_config: Configuration of the checkpoint, with the plan of its start.
        folder: The checkpoint's folder with the adapter.
        modules: Modules that an adapter may adapt, by published name.
        adapts_all: True if it must adapt all of them.

    Raises:
        ValueError: If it is not an adapter of this kind for this model.
    """
    chosen = model_config.diffusion.settings.draft_adapter
    advice = "give the folder of an adapter that was trained for this checkpoint's drafts"
    if chosen is None:
        path = checkpoint_file(model_config, folder, CONFIG)
        if path is None:
            return None
        # One file of a repository is fetched at a time.
        checkpoint_file(model_config, folder, WEIGHTS)
        chosen = str(path.parent)
        advice = f"copy or download {folder} again, or give another in draft_adapter"
    support = AdapterSupport(modules, max_rank=max(min(each[:2]) for each in modules.values()))
    try:
        found = support.check(chosen)
    except ValueError as error:
        raise ValueError(f"{error} For drafts, {advice}.") from None
    adapted = read_pairs(found)
    if adapts_all and (missing := modules.keys() - adapted.keys()):
        raise ValueError(f"{found / WEIGHTS} has nothing for {min(missing)}; {advice}.")
    config = read_config(found)
    kinds = {config.get_rank_and_scaling(name) for name in adapted}
    if len(kinds) > 1:
        raise ValueError(
            f"{found / CONFIG}: rank_pattern and alpha_pattern must be left out; {advice}."
        )
    return DraftLora(found / WEIGHTS, tuple(adapted), *kinds.pop())


def verifies_drafts(model_config: ModelConfig) -> bool:
    """Tell whether a way of a server drafts tokens and verifies them."""
    spec = spec_of(model_config)
    return spec is not None and any(way.layout.verifies for way in spec.ways)


def log_drafts(model_config: ModelConfig, lora: DraftLora | None, folder: str) -> None:
    """Log with what a server drafts.

    Args:
        model_config: Configuration of the checkpoint.
        lora: Its adapter of drafts.
        folder: The folder where it would be.
    """
    if lora is None:
        logger.info(
            "linear_spec: %s has no %s, so the plain weights draft.", model_config.model, folder
        )
    else:
        logger.info(
            "linear_spec: the LoRA %s (rank %d, scale %g) acts on drafts.",
            lora.file.parent,
            lora.rank,
            lora.scale,
        )
