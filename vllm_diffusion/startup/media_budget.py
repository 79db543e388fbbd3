"""Whether a pass holds the largest image or video that a server takes.

Their rows attend to one another in both directions, so they are computed in one pass or not at all.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_media_budget(vllm_config: VllmConfig) -> None:
    """Raise unless the largest image or video fits ``max_num_batched_tokens``.

    vLLM looks when its engine is up, and then has advice about one option only.

    Raises:
        ValueError: With the least that will do, and how to do without.
    """
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
    kinds = " and ".join(
        f"{'a' if kind == 'video' else 'an'} {kind} of up to {length} tokens"
        for kind, length in too_long.items()
    )
    is_set = getattr(model_config, "max_num_batched_tokens_is_set", True)
    given = "" if is_set else " (unset, at most max_num_seqs * max_model_len)"
    raise ValueError(
        f"max_num_batched_tokens={budget}{given} is too little for {kinds}, which one pass must "
        f"hold; set --max-num-batched-tokens to at least {max(too_long.values())}, or do without: "
        f"--limit-mm-per-prompt '{json.dumps(dict.fromkeys(too_long, 0))}'."
    )
