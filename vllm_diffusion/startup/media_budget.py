"""Check that a pass holds the largest image or video that a server offers.

The rows of an image attend to one another in both directions, so they are computed in one pass.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger("vllm.vllm_diffusion")


def choose_media(vllm_config: VllmConfig) -> None:
    """Offer no image or video that ``max_num_batched_tokens`` cannot hold; refuse a requested one.

    vLLM checks this only when its engine is up, and then names only one of the two options.

    Raises:
        ValueError: If ``--limit-mm-per-prompt`` asks for an item that does not fit, with the
            smallest budget that holds it, and the setting that leaves it out.
    """
    from vllm.config import MultiModalConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    model_config = vllm_config.model_config
    if not model_config.is_mm_prefix_lm:
        return
    info = MULTIMODAL_REGISTRY.create_processor(model_config).info
    counts = {kind: 1 for kind, most in info.allowed_mm_limits.items() if most > 0}
    lengths = info.get_mm_max_tokens_per_item(model_config.max_model_len, counts)
    budget = vllm_config.scheduler_config.max_num_batched_tokens
    too_long = {kind: lengths[kind] for kind in counts if lengths[kind] > budget}
    if not too_long:
        return
    is_set = getattr(model_config, "max_num_batched_tokens_is_set", True)
    given = "" if is_set else " (unset, at most max_num_seqs * max_model_len)"
    multimodal = model_config.get_multimodal_config()
    requested = {
        kind: length for kind, length in too_long.items() if kind in multimodal.limit_per_prompt
    }
    if requested:
        raise ValueError(
            f"max_num_batched_tokens={budget}{given} is too "
            f"little for {_items(requested)}, which --limit-mm-per-prompt asks for and one pass must "
            f"hold; set --max-num-batched-tokens to at least {max(requested.values())}, or do "
            f"without: --limit-mm-per-prompt '{json.dumps(dict.fromkeys(requested, 0))}'."
        )
    none_of_them = MultiModalConfig(limit_per_prompt=dict.fromkeys(too_long, 0))
    multimodal.limit_per_prompt.update(none_of_them.limit_per_prompt)
    logger.warning(
        "max_num_batched_tokens=%d%s does not hold %s, "
        "which one pass must: requests with one are refused; --max-num-batched-tokens of at least %d "
        "serves them.",
        budget,
        given,
        _items(too_long),
        max(too_long.values()),
    )


def _items(lengths: Mapping[str, int]) -> str:
    """Describe items, as in ``an image of up to 280 tokens and a video of up to 2496 tokens``."""
    return " and ".join(
        f"{'a' if kind == 'video' else 'an'} {kind} of up to {length} tokens"
        for kind, length in lengths.items()
    )
