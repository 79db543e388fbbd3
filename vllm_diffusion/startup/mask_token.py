"""Comparison of the mask token that a model denoises with the one that its tokenizer names."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig

logger = logging.getLogger("vllm.vllm_diffusion")

_CONFIG = "tokenizer_config.json"


def warn_of_another_mask(model_config: ModelConfig, mask: int) -> None:
    """Warn if the tokenizer's mask token is another than the model's; a fine-tune may have its own.

    Args:
        model_config: Configuration of the checkpoint.
        mask: Token of undecided positions.
    """
    try:
        token, ids = _tokenizers_mask(model_config)
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        # Files that are not as expected are reported where the tokenizer is made.
        return
    if not ids or mask in ids:
        return
    is_named = getattr(model_config.hf_config, "mask_token_id", None) is not None
    logger.warning(
        "mask_token_id=%d of %s is not the tokenizer's mask token %r, which is %d. If the checkpoint was trained "
        "with that one, start with --hf-overrides '{\"mask_token_id\": %d}'.",
        mask,
        "config.json" if is_named else "the published model, since config.json names none,",
        token,
        ids[0],
        ids[0],
    )


def _tokenizers_mask(model_config: ModelConfig) -> tuple[str, list[int]]:
    """Return the tokenizer's mask token and its ids in the tokenizer's files; none if unknown."""
    from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

    # For a checkpoint on the hub each file is a request.
    @functools.cache
    def read(name: str) -> dict[str, Any]:
        found = get_hf_file_to_dict(name, model_config.tokenizer, model_config.tokenizer_revision)
        return found or {}

    token = read(_CONFIG).get("mask_token") or read("special_tokens_map.json").get("mask_token")
    if isinstance(token, dict):
        token = token["content"]
    if not token:
        return "", []
    added = read(_CONFIG).get("added_tokens_decoder", {})
    ids = [int(number) for number, entry in added.items() if entry["content"] == token]
    if (number := read("added_tokens.json").get(token)) is not None:
        ids.append(number)
    if not ids:
        # The largest of the files.
        tokenizer = read("tokenizer.json")
        entries = tokenizer.get("added_tokens", [])
        ids = [entry["id"] for entry in entries if entry["content"] == token]
        vocabulary = tokenizer.get("model", {}).get("vocab")
        if isinstance(vocabulary, dict) and token in vocabulary:
            ids.append(vocabulary[token])
    return token, ids
