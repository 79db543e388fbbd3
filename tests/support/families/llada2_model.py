"""LLaDA2's body: partial rotary embedding, grouped sigmoid routing, shared expert.

Norms, rotary embedding and MLPs are those of ``transformers``' GLM-4-MoE, which are the same.

Source: ``modeling_llada2_moe.py`` of inclusionAI/LLaDA2.0-mini and 2.1 as found in public copies;
2.2's routing per block is FluxServe's description of ``LLaDA2MoeGate.block_routing``.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.glm4_moe.modeling_glm4_moe import (
    Glm4MoeMLP,
    Glm4MoeRMSNorm,
    Glm4MoeRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.support.families.model import END_IDS, Maker

DELETE_ID, SPLIT_ID = 318, 319


class LLaDA2(nn.Module):
    """The causal LM of ``LLaDA2MoeModelLM``, under its tensor names."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(
            Layer(config, index) for index in range(config.num_hidden_layers)
        )
        self.model.norm = Glm4MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: Tensor, attention_mask: Tensor, use_cache: bool) -> SimpleNamespace:
        hidden = self.model.word_embeddings(ids[0])
        for layer in self.model.layers:
            hidden = layer(hidden, attention_mask[0, 0])
        return SimpleNamespace(logits=self.lm_head(self.model.norm(hidden))[None])


class Layer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.input_layernorm = Glm4MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = Glm4MoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        if index < config.first_k_dense_replace:
            self.mlp: nn.Module = Glm4MoeMLP(config)
        else:
            self.mlp = Experts(config)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.input_layernorm(hidden), bias)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Attention(nn.Module):
    """Grouped queries; each head of queries and keys is normalized, then half of it is rotated."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
        rope["partial_rotary_factor"] = config.partial_rotary_factor
        self.rotary = Glm4MoeRotaryEmbedding(SimpleNamespace(**vars(config), rope_parameters=rope))
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, rows, bias=False)
        self.query_layernorm = Glm4MoeRMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = Glm4MoeRMSNorm(self.head_dim, config.rms_norm_eps)
        self.dense = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        heads = self.query_key_value(hidden).unflatten(-1, (-1, self.head_dim)).transpose(0, 1)
        query, key, value = heads.split([self.num_heads, self.num_kv_heads, self.num_kv_heads])
        turn = self.rotary(hidden, torch.arange(len(hidden)))
        query, key = apply_rotary_pos_emb(
            self.query_layernorm(query), self.key_layernorm(key), *turn, unsqueeze_dim=0
        )
        groups = self.num_heads // self.num_kv_heads
        key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
        weights = (query @ key.mT * self.head_dim**-0.5 + bias).softmax(-1)
        return self.dense((weights @ value).transpose(0, 1).flatten(-2))


class SeparateExperts(nn.ModuleList):
    """Experts as they are published, a module each; ``transformers`` has them as one."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[T, hidden_size] of the same, and [T, top_k] experts and weights."""
        routed = torch.zeros_like(x)
        for i, expert in enumerate(self):
            rows, place = (chosen == i).nonzero(as_tuple=True)
            routed[rows] += weights[rows, place, None] * expert(x[rows])
        return routed


def separate_experts(body: nn.Module) -> None:
    """Make a module of each expert of a Qwen3-MoE, in place, as PEFT and compressed-tensors know
    them.
    """
    for module in list(body.modules()):
        if isinstance(module, Qwen3MoeSparseMoeBlock):
            fused = module.experts
            module.experts = SeparateExperts(
                Glm4MoeMLP(body.config, fused.intermediate_dim) for _ in fused.down_proj
            )
            for expert, both, down in zip(
                module.experts, fused.gate_up_proj, fused.down_proj, strict=True
            ):
                expert.gate_proj.weight.data, expert.up_proj.weight.data = both.data.chunk(2)
                expert.down_proj.weight.data = down.data
            # By the name of the type that transformers knows PEFT would take the experts for one.
            body.config.model_type = "sdar_moe"


class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.moe_intermediate_size
        self.gate = Gate(config)
        self.experts = SeparateExperts(Glm4MoeMLP(config, width) for _ in range(config.num_experts))
        self.shared_experts = Glm4MoeMLP(config, width * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *self.gate(x)) + self.shared_experts(x)


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


# LLaDA2.0, and 2.1, the same weights' layout.
llada2 = Maker(
    lambda config: LLaDA2(SimpleNamespace(**config)),
    32,
    {
        "intermediate_size": 160,
        "moe_intermediate_size": 32,
        "head_dim": 32,
        "rotary_dim": 16,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        # Of no layer, as use_sliding_window says; short, so that a toy's answers tell.
        "sliding_window": 16,
    },
    file=("inclusionAI/LLaDA2.0-mini",),
    block_length_key=None,
)

# 2.2: the same, and routing per block.
llada2_2 = replace(
    llada2,
    config=llada2.config
    | {
        "use_qk_norm": True,
        "rope_theta": 3000000,
        "expert_capacity": 8,
        "delete_token_id": DELETE_ID,
        "split_token_id": SPLIT_ID,
    },
    block_length_key="block_size",
    eos_token_id=list(END_IDS),
)
