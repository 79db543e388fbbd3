"""Tiny random autoregressive targets, and drafts for them in the layout of z-lab's checkpoints.

Weights are large enough that no two tokens nearly tie: greedy answers can be compared by token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

VOCAB = 160
HIDDEN = 64
LAYERS = 4
# Of the vocabulary, as a checkpoint's own mask token is.
MASK = VOCAB - 1
WINDOW = 32
TARGETS = ("qwen3", "llama", "gemma4")

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def target_model(kind: str, seed: int = 0) -> Any:
    """A random model of ``transformers``, one of :data:`TARGETS`; Gemma 4's windows are 32 tokens."""
    import transformers

    if kind == "gemma4":
        config = transformers.Gemma4TextConfig(
            **_SHAPE,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
            global_head_dim=16,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=VOCAB,
            num_kv_shared_layers=0,
        )
        cls = transformers.Gemma4ForCausalLM
    elif kind == "llama":
        config, cls = transformers.LlamaConfig(**_SHAPE), transformers.LlamaForCausalLM
    else:
        config, cls = transformers.Qwen3Config(**_SHAPE), transformers.Qwen3ForCausalLM
    torch.manual_seed(seed)
    model = cls(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_random(name, weight.shape, torch.default_generator))
    return model


def save_target(kind: str, folder: Path, seed: int = 0) -> Path:
    """The folder of :func:`target_model`'s checkpoint, in float32."""
    target_model(kind, seed).save_pretrained(folder)
    return folder


def draft_config(**changes: Any) -> dict[str, Any]:
    """``config.json`` of a draft with two layers, for a block of eight."""
    return {
        **_SHAPE,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        "num_hidden_layers": 2,
        "num_target_layers": LAYERS,
        "block_size": 8,
        "layer_types": ["full_attention"] * 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
    } | changes


def draft_tensors(config: dict[str, Any], seed: int = 1) -> dict[str, Tensor]:
    """Random weights under z-lab's names: embedding and head are the target's."""
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layers = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, layers * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for idx in range(config["num_hidden_layers"]):
        for name, shape in {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "mlp.gate_proj": (config["intermediate_size"], hidden),
            "mlp.up_proj": (config["intermediate_size"], hidden),
            "mlp.down_proj": (hidden, config["intermediate_size"]),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }.items():
            shapes[f"layers.{idx}.{name}.weight"] = shape
    generator = torch.Generator().manual_seed(seed)
    return {name: _random(name, shape, generator) for name, shape in shapes.items()}


def save_draft(folder: Path, seed: int = 1, **changes: Any) -> Path:
    """The folder of a random draft; ``changes`` are of its ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = draft_config(**changes)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(draft_tensors(config, seed), folder / "model.safetensors")
    return folder


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        # Norms, and Gemma 4's scalar of a layer.
        return 1 + 0.1 * noise
    return noise * (1.0 if "embed" in name or "lm_head" in name else 1.5 / shape[-1] ** 0.5)
