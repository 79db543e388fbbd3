"""Requests and pictures of a pass, where the operator sets no limits."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig, SchedulerConfig


logger = logging.getLogger("vllm.vllm_diffusion")

# Running canvases leave one in this many of a pass's tokens to prompts. Otherwise a prompt next to
# a full batch gets the room of one canvas, 256 tokens per pass, and each pass with a prompt is
# slower for all.
PROMPTS_SHARE = 4
# Number of stock vLLM, below which prompts get no share.
FEWEST = 8


def default_max_num_seqs(scheduler_config: SchedulerConfig, given: int, canvas_length: int) -> int:
    """Return how many requests run at once if the operator sets no number, and log the reason.

    Stock vLLM sets 8 for this architecture, since its sampler holds whole logits of every canvas,
    and does not distinguish an operator's number from its own default. Our sampler holds a tile of
    logits at a time, so that a pass's tokens limit the number. Memory does not: vLLM profiles a
    pass with the slots of all requests in place, gives the rest to the KV cache, and logs how many
    requests it holds; those beyond wait.

    Args:
        scheduler_config: Configuration with the rows of a pass.
        given: vLLM's default for other models.
        canvas_length: Rows of a canvas.

    Returns:
        A number of at least 1. It leaves prompts their share of a pass, unless it would be below
        ``FEWEST``.
    """
    budget = scheduler_config.max_num_batched_tokens
    # More requests than that would take turns.
    canvases = budget // canvas_length
    running = max(canvases - canvases // PROMPTS_SHARE, min(FEWEST, canvases))
    # The scheduler must not run more than the runner has slots for.
    chosen = max(1, min(given, running), scheduler_config.max_num_active_seqs or 0)
    logger.info(
        "max_num_seqs=%d: max_num_batched_tokens=%d holds %d canvases of %d, of which prompts are left "
        "%d; --max-num-seqs sets another number.",
        chosen,
        budget,
        canvases,
        canvas_length,
        max(canvases - chosen, 0),
    )
    return chosen


def choose_media(model_config: ModelConfig, budget: int, is_set: bool) -> None:
    """Offer no image or video that ``max_num_batched_tokens`` cannot hold; refuse a requested one.

    The rows of an image attend to one another in both directions, so they are computed in one pass.
    vLLM checks this only when its engine is up, and then names only one of the two options.

    Args:
        model_config: Configuration of the model, whose limits of items are changed in place.
        budget: ``max_num_batched_tokens``.
        is_set: True if the operator set it.

    Raises:
        ValueError: If ``--limit-mm-per-prompt`` asks for an item that does not fit, with the
            smallest budget that holds it, and the setting that leaves it out.
    """
    from vllm.config import MultiModalConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    if not model_config.is_mm_prefix_lm:
        return
    info = MULTIMODAL_REGISTRY.create_processor(model_config).info
    counts = {kind: 1 for kind, most in info.allowed_mm_limits.items() if most > 0}
    lengths = info.get_mm_max_tokens_per_item(model_config.max_model_len, counts)
    too_long = {kind: lengths[kind] for kind in counts if lengths[kind] > budget}
    if not too_long:
        return
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


def choose_encoder_room(model_config: ModelConfig, scheduler: SchedulerConfig, length: int) -> None:
    """Give the pictures of one block of a prompt room in the encoder's pass and in its cache.

    A block is computed whole, so that all its pictures are needed at once: the end of one, short
    ones and the begin of another. vLLM makes room for the longest one alone, and a prompt with more
    would wait for ever.

    Args:
        model_config: Configuration of the model.
        scheduler: Configuration of the scheduler, changed in place.
        length: Tokens of a block.
    """
    from vllm.multimodal import MULTIMODAL_REGISTRY

    if not model_config.is_multimodal_model:
        return
    info = MULTIMODAL_REGISTRY.create_processor(model_config).info
    counts = {kind: 1 for kind, most in info.allowed_mm_limits.items() if most > 0}
    if not counts:
        return
    lengths = info.get_mm_max_tokens_per_item(model_config.max_model_len, counts)
    longest = max(lengths.values())
    if max(info.allowed_mm_limits.values()) > 1:
        # At least a token of the first and of the last are in the block.
        longest = min(2 * longest + length - 2, model_config.max_model_len)
    scheduler.encoder_cache_size = max(scheduler.encoder_cache_size, longest)
    scheduler.max_num_encoder_input_tokens = max(scheduler.max_num_encoder_input_tokens, longest)


def _items(lengths: Mapping[str, int]) -> str:
    """Describe items, as in ``an image of up to 280 tokens and a video of up to 2496 tokens``."""
    return " and ".join(
        f"{'a' if kind == 'video' else 'an'} {kind} of up to {length} tokens"
        for kind, length in lengths.items()
    )
