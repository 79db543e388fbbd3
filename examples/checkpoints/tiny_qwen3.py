"""What the tiny SDAR and the tiny Qwen3 have in common: sizes, sampling defaults, and their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from tiny_model import (
    MAX_POSITION_EMBEDDINGS,
    TOKEN_ID,
    VOCAB_SIZE,
    build_tokenizer,
    moved_in_when_complete,
)
from torch import Tensor

TOKENS = {f"{name}_token_id": TOKEN_ID[f"<{name}>"] for name in ("bos", "eos", "pad")}
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
# SDAR is published with contexts of 32,768 tokens: 1e6.
ROPE_THETA = 10_000
ROPE = {"rope_type": "default", "rope_theta": float(ROPE_THETA)}
SAMPLING = TOKENS | {
    "eos_token_id": [TOKEN_ID["<eos>"], TOKEN_ID["<turn|>"], TOKEN_ID["<|tool_response>"]],
    # Greedy where a request says nothing: at temperature 1, SDAR's published default, a model this
    # small draws wrong letters.
    "temperature": 0.0,
}


def write_files(
    directory: str | Path,
    tensors: dict[str, Tensor],
    config: dict[str, Any],
    generation_config: dict[str, Any],
) -> None:
    """Write weights, configuration and tokenizer, each file moved in when complete.

    Args:
        directory: Made if absent. A reader never sees half a file.
        tensors: The weights by name.
        config: Content of ``config.json``.
        generation_config: Content of ``generation_config.json``.
    """
    with moved_in_when_complete(directory) as staging:
        save_file(tensors, staging / "model.safetensors", metadata={"format": "pt"})
        build_tokenizer().save_pretrained(staging)
        for name, content in (("config", config), ("generation_config", generation_config)):
            (staging / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
