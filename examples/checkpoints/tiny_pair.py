"""The shipped tiny pair: an autoregressive Qwen3, and how both of its checkpoints are saved.

Tokenizer and chat template are those of the tiny DiffusionGemma (``tiny_model.py``). The target is an
ordinary ``Qwen3ForCausalLM``; its draft is ``vllm_diffusion.drafting.reference``'s.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_qwen3 import ROPE, SAMPLING, SIZES, TOKENS, write_files
from transformers import Qwen3Config, Qwen3ForCausalLM

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
