"""Names and shapes of the published checkpoints' tensors, from rules over their configurations.

Each configuration is the part of a published ``config.json`` that decides shapes, with where it was
read. What counts as read: the publisher's own file, or a public copy or test that states to be taken
from it. Figures of the published files that the rules are checked against: ``num_tensors`` and
``num_bytes`` (all in bfloat16).

Found nowhere, and so left out: SDAR-30B-A3B's ``config.json`` and index (the rules for its class are
Qwen3-MoE's, which its code is generated from), LLaDA2.1-mini's and 2.2-mini's, Fast-dLLM v2's index
(its code says Qwen2.5's names), Stable-DiffCoder's index (its class is ``transformers``' Llama), and
the adapter's tensors of Nemotron-Labs-Diffusion other than through tests that write such a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Published:
    """A checkpoint.

    Attributes:
        config: What decides its tensors.
        source: Where that was read.
        num_tensors: As published, where it is known.
        num_bytes: As published, where it is known.
    """

    config: dict[str, Any]
    source: str
    num_tensors: int | None = None
    num_bytes: int | None = None


def _decoder_layer(config: dict[str, Any], prefix: str) -> dict[str, Shape]:
    """Norms and projections that Qwen, Llama and Mistral share."""
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    query, key = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        f"{prefix}.self_attn.q_proj.weight": (query, hidden),
        f"{prefix}.self_attn.k_proj.weight": (key, hidden),
        f"{prefix}.self_attn.v_proj.weight": (key, hidden),
        f"{prefix}.self_attn.o_proj.weight": (hidden, query),
    }


def _mlp(hidden: int, intermediate: int, prefix: str) -> dict[str, Shape]:
    return {
        f"{prefix}.gate_proj.weight": (intermediate, hidden),
        f"{prefix}.up_proj.weight": (intermediate, hidden),
        f"{prefix}.down_proj.weight": (hidden, intermediate),
    }


def _ends(config: dict[str, Any], body: str, embedding: str, head: str) -> dict[str, Shape]:
    """Embedding, last norm and head; a tied head has no tensor."""
    tensors: dict[str, Shape] = {
        f"{body}.{embedding}.weight": (config["vocab_size"], config["hidden_size"]),
        f"{body}.norm.weight": (config["hidden_size"],),
    }
    if not config["tie_word_embeddings"]:
        tensors[f"{head}.weight"] = (config["vocab_size"], config["hidden_size"])
    return tensors


def _dense(
    config: dict[str, Any], *, body: str = "model", head: str = "lm_head"
) -> dict[str, Shape]:
    tensors = _ends(config, body, "embed_tokens", head)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"{body}.layers.{layer}"
        tensors |= _decoder_layer(config, prefix)
        tensors |= _mlp(config["hidden_size"], config["intermediate_size"], f"{prefix}.mlp")
    return tensors


def _head_norms(config: dict[str, Any]) -> dict[str, Shape]:
    return {
        f"model.layers.{layer}.self_attn.{name}_norm.weight": (config["head_dim"],)
        for layer in range(config["num_hidden_layers"])
        for name in "qk"
    }


def _sdar(config: dict[str, Any]) -> dict[str, Shape]:
    return _dense(config) | _head_norms(config)


def _sdar_moe(config: dict[str, Any]) -> dict[str, Shape]:
    tensors = _ends(config, "model", "embed_tokens", "lm_head") | _head_norms(config)
    hidden = config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= _decoder_layer(config, prefix)
        tensors[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            name = f"{prefix}.mlp.experts.{expert}"
            tensors |= _mlp(hidden, config["moe_intermediate_size"], name)
    return tensors


def _nemotron(config: dict[str, Any]) -> dict[str, Shape]:
    return _dense(config, body="encoder", head="diffusion_head")


def nemotron_lora(config: dict[str, Any], rank: int) -> dict[str, Shape]:
    """``linear_spec_lora/adapter_model.safetensors``: PEFT's layout, on every layer's ``o_proj``."""
    width = config["num_attention_heads"] * config["head_dim"]
    tensors: dict[str, Shape] = {}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"base_model.model.encoder.layers.{layer}.self_attn.o_proj"
        tensors[f"{prefix}.lora_A.weight"] = (rank, width)
        tensors[f"{prefix}.lora_B.weight"] = (config["hidden_size"], rank)
    return tensors


def _fast_dllm(config: dict[str, Any]) -> dict[str, Shape]:
    config = {"head_dim": config["hidden_size"] // config["num_attention_heads"]} | config
    tensors = _dense(config)
    for name, shape in list(tensors.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.replace(".weight", ".bias")] = shape[:1]
    return tensors


def _llada2(config: dict[str, Any]) -> dict[str, Shape]:
    tensors = _ends(config, "model", "word_embeddings", "lm_head")
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.attention.query_key_value.weight": (
                (heads + 2 * kv_heads) * head_dim,
                hidden,
            ),
            f"{prefix}.attention.query_layernorm.weight": (head_dim,),
            f"{prefix}.attention.key_layernorm.weight": (head_dim,),
            f"{prefix}.attention.dense.weight": (hidden, heads * head_dim),
        }
        if layer < config["first_k_dense_replace"]:
            tensors |= _mlp(hidden, config["intermediate_size"], f"{prefix}.mlp")
            continue
        width = config["moe_intermediate_size"]
        tensors[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
        # Float32, also where all else is bfloat16.
        tensors[f"{prefix}.mlp.gate.expert_bias"] = (config["num_experts"],)
        shared = width * config["num_shared_experts"]
        tensors |= _mlp(hidden, shared, f"{prefix}.mlp.shared_experts")
        for expert in range(config["num_experts"]):
            tensors |= _mlp(hidden, width, f"{prefix}.mlp.experts.{expert}")
    return tensors


_RULES: dict[str, Callable[[dict[str, Any]], dict[str, Shape]]] = {
    "SDARForCausalLM": _sdar,
    "SDARMoeForCausalLM": _sdar_moe,
    "NemotronLabsDiffusionModel": _nemotron,
    "LLaDA2MoeModelLM": _llada2,
    "Fast_dLLM_QwenForCausalLM": _fast_dllm,
    "StableDiffcoderForCausalLM": _dense,
}


def published_tensors(config: dict[str, Any]) -> dict[str, Shape]:
    """Every tensor of a checkpoint with this ``config.json``, by its published name."""
    return _RULES[config["architectures"][0]](config)


def num_parameters(config: dict[str, Any]) -> int:
    """How many numbers those tensors hold."""
    return sum(math.prod(shape) for shape in published_tensors(config).values())


def _qwen3(**sizes: int) -> dict[str, Any]:
    return {
        "architectures": ["SDARForCausalLM"],
        "vocab_size": 151936,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    } | sizes


def _ministral3(**sizes: int) -> dict[str, Any]:
    return {
        "architectures": ["NemotronLabsDiffusionModel"],
        "vocab_size": 131072,
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    } | sizes


def _llada2_config(**sizes: int) -> dict[str, Any]:
    return {
        "architectures": ["LLaDA2MoeModelLM"],
        "vocab_size": 157184,
        "head_dim": 128,
        "num_key_value_heads": 4,
        "num_experts": 256,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "tie_word_embeddings": False,
    } | sizes


_SDAR_MODELS = "JetAstra/SDAR@c2041a8 training/model/{}: config.json, model.safetensors.index.json"
_DFACTORY = "inclusionAI/dFactory@c29d72c configs/model_configs/{}/config.json"
_FLUX_14B = "FLX-OSS/FluxServe, tests of the 14B checkpoint's geometry and header"
_VLLM_MAIN = "vLLM's main branch, test of checkpoint dimensions"

PUBLISHED: dict[str, Published] = {
    "SDAR-1.7B-Chat": Published(
        _qwen3(
            hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16
        ),
        "hxhcreate/DARE@b6aa3ba models/SDAR-1dot7B-Chat/config.json",
    ),
    "SDAR-4B-Chat": Published(
        _qwen3(
            hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32
        ),
        _SDAR_MODELS.format("SDAR-4B-Chat"),
        num_tensors=399,
        num_bytes=8822848512,
    ),
    "SDAR-8B-Chat": Published(
        _qwen3(
            hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32
        ),
        _SDAR_MODELS.format("SDAR-8B-Chat"),
        num_tensors=399,
        num_bytes=16381470720,
    ),
    "Nemotron-Labs-Diffusion-3B": Published(
        _ministral3(hidden_size=3072, intermediate_size=9216, num_hidden_layers=26), _VLLM_MAIN
    ),
    "Nemotron-Labs-Diffusion-8B": Published(
        _ministral3(hidden_size=4096, intermediate_size=14336, num_hidden_layers=34), _VLLM_MAIN
    ),
    "Nemotron-Labs-Diffusion-14B": Published(
        _ministral3(hidden_size=5120, intermediate_size=16384, num_hidden_layers=40),
        _FLUX_14B,
        num_tensors=363,
    ),
    "LLaDA2.0-mini": Published(
        _llada2_config(
            hidden_size=2048,
            intermediate_size=5120,
            moe_intermediate_size=512,
            num_hidden_layers=20,
            num_attention_heads=16,
        ),
        _DFACTORY.format("llada2_mini"),
    ),
    "LLaDA2.0-flash": Published(
        _llada2_config(
            hidden_size=4096,
            intermediate_size=9216,
            moe_intermediate_size=1024,
            num_hidden_layers=32,
            num_attention_heads=32,
        ),
        _DFACTORY.format("llada2_flash")
        + "; 2.1-flash and 2.2-flash have the same layout: FluxServe's notes on both headers",
        num_tensors=24161,
    ),
    "Fast_dLLM_v2_7B": Published(
        {
            "architectures": ["Fast_dLLM_QwenForCausalLM"],
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
        },
        "card: Qwen2.5-7B-Instruct's body, 28 layers, 28 and 4 heads; other sizes Qwen2.5-7B's",
    ),
    "Stable-DiffCoder-8B-Instruct": Published(
        {
            "architectures": ["StableDiffcoderForCausalLM"],
            "vocab_size": 155136,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
        "config.json of Seed-Coder-8B, whose body it is; 8.25 B parameters on its page",
    ),
}
