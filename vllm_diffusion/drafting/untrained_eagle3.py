"""EAGLE-3 draft with random weights, to check that one is served and to measure its cost.

Its proposals are random, so it has no other use.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from vllm_diffusion.weights.regular_files import why_not_folder


def save_untrained_eagle3(target: Path, folder: Path, seed: int = 0) -> Path:
    """Write a draft of one layer that reads three layers of its target, and has its head.

    Args:
        target: A checkpoint of Qwen3 or Llama, with ``lm_head.weight`` or tied to its embedding.
        folder: Folder to write to, made if absent.
        seed: Seed of the weights.

    Raises:
        ValueError: If the target's files are not those of a language model with attention heads and at
            least four layers.
    """
    if problem := why_not_folder(target):
        raise ValueError(f"{target} {problem}; name the folder of a target.")
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    needed = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
    missing = [name for name in (*needed, "num_hidden_layers") if name not in config]
    if missing or config["num_hidden_layers"] < 4:
        raise ValueError(
            f"{target} has no {missing[0]} in its config.json; name an EAGLE-3 draft."
            if missing
            else f"{target} has fewer than four layers; name an EAGLE-3 draft."
        )
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    num_layers = config["num_hidden_layers"]
    theirs = {
        name: config[name]
        for name in (
            *needed,
            "num_key_value_heads",
            "rms_norm_eps",
            "rope_parameters",
            "rope_theta",
            "rope_scaling",
            "max_position_embeddings",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "dtype",
        )
        if name in config
    }
    ours = theirs | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "head_dim": head_dim,
        "draft_vocab_size": config["vocab_size"],
        "tie_word_embeddings": False,
        # An early one, one in the middle, a late one, counted from 1.
        "eagle_aux_hidden_state_layer_ids": [1, num_layers // 2, num_layers - 1],
    }
    queries = heads * head_dim
    keys = config.get("num_key_value_heads", heads) * head_dim
    inner = config["intermediate_size"]
    shapes = {
        "fc": (hidden, 3 * hidden),
        "norm": (hidden,),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
    }
    generator = torch.Generator().manual_seed(seed)
    head = _head(target)
    tensors = {
        f"{name}.weight": (
            torch.ones(shape)
            if len(shape) == 1
            else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        ).to(head.dtype)
        for name, shape in shapes.items()
    }
    tensors["lm_head.weight"] = head
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _head(target: Path) -> Tensor:
    """Read the target's output head, [vocab_size, hidden], which may be its embedding."""
    found: dict[str, Tensor] = {}
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name in ("lm_head.weight", "model.embed_tokens.weight"):
                    found[name] = file.get_tensor(name)
    if not found:
        raise ValueError(f"{target} has no output head in *.safetensors; name an EAGLE-3 draft.")
    return found.get("lm_head.weight", next(iter(found.values())))
