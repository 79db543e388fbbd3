"""The shipped tiny Qwen3, the target of the tiny pair; and what the tiny SDAR has of it: sizes and
files.

Tokenizer and chat template are those of the tiny DiffusionGemma (``tiny_model.py``). The target is
an ordinary ``Qwen3ForCausalLM``; its draft is ``vllm_diffusion.drafting.reference``'s.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_model import (
    MAX_POSITION_EMBEDDINGS,
    TOKEN_ID,
    VOCAB_SIZE,
    build_tokenizer,
    moved_in_when_complete,
)
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

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

BLOCK_SIZE = 8
# All but the last. The formula of published drafts has one layer for a target of four.
TARGET_LAYER_IDS = [0, 1, 2]

TARGET_CONFIG = {
    **SIZES,
    **TOKENS,
    "rope_parameters": ROPE,
    "use_cache": True,
    # What it computes in. The file holds bfloat16, which both sides widen exactly.
    "dtype": "float32",
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


def build_target() -> Qwen3ForCausalLM:
    """The target with random weights, in fp32."""
    return Qwen3ForCausalLM(Qwen3Config(**TARGET_CONFIG)).float()


def load_target(directory: Path) -> Qwen3ForCausalLM:
    """The target with the weights that :func:`save_target` wrote, in fp32."""
    return Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def save_target(model: Qwen3ForCausalLM, directory: str | Path) -> None:
    """Write weights (rounded to bfloat16), configuration and tokenizer.

    Args:
        model: What :func:`build_target` made, in fp32.
        directory: Made if absent. A reader never sees half a file.
    """
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | TARGET_CONFIG
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in model.state_dict().items()}
    write_files(directory, tensors, config, SAMPLING)
