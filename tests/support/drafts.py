"""Tiny random autoregressive targets, and drafts for them in the layout of z-lab's checkpoints.

Weights are large enough that no two tokens nearly tie: greedy answers can be compared by token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
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


def target_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random model of ``transformers``, one of :data:`TARGETS`; Gemma 4's windows are 32 tokens."""
    import transformers

    shape = _SHAPE | changes
    if kind == "gemma4":
        config = transformers.Gemma4TextConfig(
            **shape,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2),
            global_head_dim=16,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=shape["vocab_size"],
            num_kv_shared_layers=0,
        )
        cls = transformers.Gemma4ForCausalLM
    elif kind == "llama":
        config, cls = transformers.LlamaConfig(**shape), transformers.LlamaForCausalLM
    else:
        config, cls = transformers.Qwen3Config(**shape), transformers.Qwen3ForCausalLM
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


def save_eagle3(folder: Path, head: Tensor, seed: int = 2) -> Path:
    """The folder of a random EAGLE-3 draft: one layer that reads three of the target's.

    Args:
        folder: Made if it is not there.
        head: [VOCAB, HIDDEN], the target's output head, which is the draft's too.
        seed: Of the other weights.
    """
    config = _SHAPE | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "dtype": "float32",
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "rms_norm_eps": 1e-6,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "midlayer.self_attn.q_proj.weight": (64, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": (32, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": (32, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, 64),
        "midlayer.mlp.gate_proj.weight": (96, HIDDEN),
        "midlayer.mlp.up_proj.weight": (96, HIDDEN),
        "midlayer.mlp.down_proj.weight": (HIDDEN, 96),
        "midlayer.hidden_norm.weight": (HIDDEN,),
        "midlayer.input_layernorm.weight": (HIDDEN,),
        "midlayer.post_attention_layernorm.weight": (HIDDEN,),
    }
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    tensors["lm_head.weight"] = head.detach().clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if len(shape) == 1:
        # Norms, and Gemma 4's scalar of a layer.
        return 1 + 0.1 * noise
    if "lm_head" in name:
        # A few tokens are said often, so that a random draft is right at times; and the mask would be.
        noise *= torch.randn(shape[0], 1, generator=generator).exp()
        # The mask token is the last.
        noise[-1] *= 3
        return noise
    return noise * (1.0 if "embed" in name else 1.5 / shape[-1] ** 0.5)


def greedy_tokens(model: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """What ``transformers`` says."""
    with torch.no_grad():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def features(model: Any, tokens: list[int], layer_ids: list[int]) -> Tensor:
    """[num_tokens, num_layers * hidden_size]: what a draft reads of ``transformers``' target."""
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer + 1][0] for layer in layer_ids], dim=-1)


def block_rows(
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    embeddings: Tensor,
    context: Tensor,
    window: int | None = None,
) -> Tensor:
    """[width, hidden_size]: a block's last hidden rows, in one forward without a cache.

    Args:
        config: Of the draft.
        tensors: Of the draft.
        embeddings: [width, hidden_size], of the block's tokens.
        context: [num_tokens, num_layers * hidden_size], :func:`features` of what is before it.
        window: How many positions a row sees back, itself included; ``None`` for all.
    """
    head, eps = config["head_dim"], config["rms_norm_eps"]
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    num_context, width = len(context), len(embeddings)
    positions = torch.arange(num_context + width)
    angles = torch.outer(
        positions.float(), config["rope_theta"] ** (-torch.arange(0, head, 2).float() / head)
    )

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), tensors[name + ".weight"], eps)

    def rotated(x: Tensor, rows: slice) -> Tensor:
        cos, sin = angles[rows].cos()[:, None], angles[rows].sin()[:, None]
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    known = norm(context @ tensors["fc.weight"].T, "hidden_norm")
    hidden = embeddings
    for idx in range(config["num_hidden_layers"]):
        layer = f"layers.{idx}."

        def heads(x: Tensor, name: str, layer: str = layer) -> Tensor:
            return (x @ tensors[f"{layer}self_attn.{name}.weight"].T).unflatten(-1, (-1, head))

        rows = norm(hidden, layer + "input_layernorm")
        both = torch.cat([known, rows])
        block = slice(num_context, None)
        query = rotated(norm(heads(rows, "q_proj"), layer + "self_attn.q_norm"), block)
        key = rotated(norm(heads(both, "k_proj"), layer + "self_attn.k_norm"), slice(None))
        key, value = (
            x.repeat_interleave(group, dim=1).transpose(0, 1) for x in (key, heads(both, "v_proj"))
        )
        scores = query.transpose(0, 1) @ key.transpose(1, 2) * head**-0.5
        if window is not None:
            distance = positions[block, None] - positions[None]
            scores = scores.masked_fill(distance.abs() >= window, float("-inf"))
        mixed = (scores.softmax(dim=-1) @ value).transpose(0, 1).flatten(1)
        hidden = hidden + mixed @ tensors[layer + "self_attn.o_proj.weight"].T
        rows = norm(hidden, layer + "post_attention_layernorm")
        gate, up, down = (
            tensors[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        hidden = hidden + (F.silu(rows @ gate.T) * (rows @ up.T)) @ down.T
    return norm(hidden, "norm")
