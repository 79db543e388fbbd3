"""LLaDA2's body in plain PyTorch: partial rotary embedding, grouped sigmoid routing, shared expert.

Source: ``modeling_llada2_moe.py`` of inclusionAI/LLaDA2.0-mini and 2.1 as found in public copies;
2.2's routing per block is FluxServe's description of ``LLaDA2MoeGate.block_routing``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.families.model import END_IDS, MASK_ID, MAX_LENGTH, VOCAB_SIZE, TinyModel

DELETE_ID, SPLIT_ID = 318, 319


def llada2(
    *,
    version: str = "2.0",
    block_length: int = 32,
    seed: int = 0,
    sharpness: float = 3.0,
) -> TinyModel:
    """LLaDA2.0, 2.1 (the same weights' layout) or 2.2 (the same, and routing per block).

    ``mask_token_id`` is in no published file, where 156895 is a default of the code; 4 must be said.
    """
    config: dict[str, Any] = {
        "architectures": ["LLaDA2MoeModelLM"],
        "auto_map": {
            "AutoConfig": "configuration_llada2_moe.LLaDA2MoeConfig",
            "AutoModel": "modeling_llada2_moe.LLaDA2MoeModel",
            "AutoModelForCausalLM": "modeling_llada2_moe.LLaDA2MoeModelLM",
        },
        "model_type": "llada2_moe",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 160,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "rotary_dim": 16,
        "first_k_dense_replace": 1,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "num_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "router_dtype": "fp32",
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rope_theta": 600000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "use_bias": False,
        "use_qkv_bias": False,
        "use_rmsnorm": True,
        "norm_head": False,
        "norm_softmax": False,
        "embedding_dropout": 0.0,
        "attention_dropout": 0.0,
        "output_dropout": 0.0,
        "output_router_logits": False,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": False,
        "use_sliding_window": False,
        "max_window_layers": 28,
        "pad_token_id": END_IDS[0],
        "eos_token_id": END_IDS[0],
        "mask_token_id": MASK_ID,
        "torch_dtype": "float32",
    }
    if version == "2.2":
        config |= {
            "use_qk_norm": True,
            "rope_theta": 3000000,
            "expert_capacity": 8,
            "block_size": block_length,
            "delete_token_id": DELETE_ID,
            "split_token_id": SPLIT_ID,
        }
    ends = list(END_IDS) if version == "2.2" else END_IDS[0]
    return TinyModel(
        LLaDA2(SimpleNamespace(**config)),
        config=config,
        generation_config={"eos_token_id": ends, "pad_token_id": END_IDS[0]},
        block_length=block_length,
        seed=seed,
        sharpness=sharpness,
    )


class LLaDA2(nn.Module):
    """The causal LM of ``LLaDA2MoeModelLM``, under its tensor names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(
            Layer(config, index) for index in range(config.num_hidden_layers)
        )
        self.model.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, attention_mask: Tensor, use_cache: bool) -> SimpleNamespace:
        hidden = self.model.word_embeddings(ids[0])
        for layer in self.model.layers:
            hidden = layer(hidden, attention_mask[0, 0])
        return SimpleNamespace(logits=self.lm_head(self.model.norm(hidden))[None])


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Layer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if index < config.first_k_dense_replace:
            self.mlp: nn.Module = MLP(config.hidden_size, config.intermediate_size)
        else:
            self.mlp = Experts(config)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.input_layernorm(hidden), bias)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Grouped queries; each head of queries and keys is normalised, then half of it is rotated."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.rotary_dim = int(config.head_dim * config.partial_rotary_factor)
        self.theta = float(config.rope_theta)
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, rows, bias=False)
        self.query_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.dense = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def rotate(self, x: Tensor) -> Tensor:
        """``x`` is [heads, T, head_dim]; the first ``rotary_dim`` of it turn with the position."""
        half = self.rotary_dim // 2
        frequency = self.theta ** -(torch.arange(half) * 2 / self.rotary_dim)
        angle = torch.arange(x.shape[1])[:, None] * frequency[None, :]
        left, right, rest = x.split([half, half, self.head_dim - self.rotary_dim], dim=-1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        heads = self.query_key_value(hidden).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads])
        query = self.rotate(self.query_layernorm(query))
        key = self.rotate(self.key_layernorm(key))
        groups = self.num_heads // self.num_kv_heads
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        weights = (query @ key.mT * self.head_dim**-0.5 + bias).softmax(-1)
        return self.dense((weights @ value).transpose(0, 1).flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = nn.ModuleList(
            MLP(config.hidden_size, config.moe_intermediate_size) for _ in range(config.num_experts)
        )
        self.shared_experts = MLP(
            config.hidden_size, config.moe_intermediate_size * config.num_shared_experts
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen, weights = self.gate(x)
        routed = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            routed[rows] += weights[rows, place, None] * expert(x[rows])
        return routed + self.shared_experts(x)


class Gate(nn.Module):
    """Which experts a token takes, and with which weights; in float32."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.register_buffer("expert_bias", torch.zeros(config.num_experts))
        self.top_k = config.num_experts_per_tok
        self.num_groups, self.top_groups = config.n_group, config.topk_group
        self.scaling = config.routed_scaling_factor
        # n_group and topk_group are in LLaDA2.2's configuration too, and mean nothing there.
        self.capacity = getattr(config, "expert_capacity", 0)
        self.block_size = getattr(config, "block_size", 0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` is [T, hidden]; returns experts and weights, [T, top_k].

        The bias decides which experts are chosen, not their weights.
        """
        scores = F.linear(x, self.weight).sigmoid()
        biased = scores + self.expert_bias
        allowed = self.allowed_in_block(biased) if self.capacity else self.allowed_groups(biased)
        chosen = biased.masked_fill(~allowed, float("-inf")).topk(self.top_k).indices
        weights = scores.gather(-1, chosen)
        return chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling

    def allowed_groups(self, biased: Tensor) -> Tensor:
        """[T, experts]: those of the best groups, a group being as good as its best two experts."""
        groups = biased.unflatten(-1, (self.num_groups, -1))
        best = groups.topk(2).values.sum(-1).topk(self.top_groups).indices
        allowed = torch.zeros(groups.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        return allowed.repeat_interleave(groups.shape[-1], -1)

    def allowed_in_block(self, biased: Tensor) -> Tensor:
        """[T, experts]: the ``capacity`` best of a block, each as good as for its best token."""
        if len(biased) % self.block_size:
            raise ValueError(f"{len(biased)} tokens are no whole number of {self.block_size}")
        best = biased.unflatten(0, (-1, self.block_size)).amax(1).topk(self.capacity).indices
        blocks = len(biased) // self.block_size
        allowed = torch.zeros(blocks, biased.shape[-1], dtype=torch.bool).scatter(-1, best, True)
        return allowed.repeat_interleave(self.block_size, 0)
