"""Published checkpoints: what of their configurations decides shapes, and the figures of their
files.

Each configuration is the part of a published ``config.json`` that decides shapes, with where it was
read. What counts as read: the publisher's own file, or a public copy or test that states to be
taken from it. ``num_tensors`` and ``num_bytes`` (all in bfloat16) are of the files, ``billions`` of
parameters of the cards.

Found nowhere, and so left out: SDAR-30B-A3B's ``config.json`` and index (its code is generated from
Qwen3-MoE's), LLaDA2.1-mini's and 2.2-mini's, Fast-dLLM v2's index and figures (its code has
Qwen2.5's names), Stable-DiffCoder's index (its class is ``transformers``' Llama), all of
DreamReasoner-8B's (a port has Qwen3's names), and the adapter's tensors of Nemotron-Labs-Diffusion
other than through tests that write such a file, and MinerU-Diffusion's ``config.json`` and index
(its class has default sizes, which may be others).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """A checkpoint.

    Attributes:
        config: What decides its tensors.
        source: Where that was read.
        num_tensors: As published, where it is known.
        num_bytes: As published, where it is known.
        billions: Of parameters, by the card or its page, to a hundredth.
    """

    config: dict[str, Any]
    source: str
    num_tensors: int | None = None
    num_bytes: int | None = None
    billions: float | None = None


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
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "llama_4_scaling_beta": 0.1,
        },
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
        _ministral3(hidden_size=3072, intermediate_size=9216, num_hidden_layers=26),
        _VLLM_MAIN,
        billions=3.83,
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
        billions=16.26,
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
        billions=102.89,
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
        billions=8.25,
    ),
}
