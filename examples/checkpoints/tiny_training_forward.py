"""DiffusionGemma's two forward passes, written out for training on batches of unequal prefixes.

Plain functions of the parameters of ``transformers``' modules; ``train_tiny_checkpoint.py`` checks
them against the logits inside ``generate``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DiffusionGemmaForBlockDiffusion

RMS_EPS = 1e-6


class TrainingForward:
    """DiffusionGemma's encoder and decoder passes for batches of different prefix lengths.

    The same parameters and the same mathematics as ``transformers``' modules, in fp32: norms
    without a scale of their own are shared, norm scales are folded into the matrices behind them,
    and all experts are computed and weighted by the router (zero for those not chosen).

    Shape legend: B rows, L encoder tokens, C canvas tokens, T = B * L or B * C, H hidden, E
    experts.
    """

    def __init__(self, model: DiffusionGemmaForBlockDiffusion):
        self.model = model
        self.decoder = model.model.decoder
        self.config = model.config.text_config
        self.prepare()
        positions = torch.arange(self.config.max_position_embeddings)[None]
        self.rope = {
            kind: tuple(
                table[0] for table in self.decoder.rotary_emb(torch.zeros(1), positions, kind)
            )
            for kind in set(self.config.layer_types)
        }

    def prepare(self) -> None:
        """Fold norm scales into matrices: once for all passes between two optimizer steps."""
        self.weights = [
            (_qkv_weights(layer), _layer_weights(layer)) for layer in self.decoder.layers
        ]

    def encode(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Causal pass.

        Args:
            tokens: [B, L] int64; padding on the right is harmless to what stands before it.

        Returns:
            Normalised hidden states [B, L, H], and per layer keys and values [B, heads, L, D].
        """
        L = tokens.shape[1]
        hidden = self.decoder.embed_tokens(tokens)
        distance = torch.arange(L)[:, None] - torch.arange(L)[None]
        causal = distance >= 0
        masks = {
            "full_attention": _additive(causal),
            "sliding_attention": _additive(causal & (distance < self.config.sliding_window)),
        }
        cache = []
        for (qkv, rest), kind in zip(self.weights, self.config.layer_types, strict=True):
            cos, sin = (table[:L] for table in self.rope[kind])
            q, k, v = _project_qkv(hidden, cos, sin, *qkv)
            cache.append((k, v))
            attended = _attend(q, k, v, masks[kind])
            hidden = _finish_layer(hidden, attended, *rest)
        return self.decoder.norm(hidden), cache

    def decode(
        self,
        canvas: Tensor,
        canvas_start: Tensor,
        cache: list[tuple[Tensor, Tensor]],
        self_conditioning_logits: Tensor | None = None,
    ) -> Tensor:
        """One denoising pass.

        Args:
            canvas: [B, C] int64, noisy tokens.
            canvas_start: [B] int64; row b sees the cached keys before ``canvas_start[b]`` (on
                sliding layers the last ``sliding_window - 1`` of them) and its whole canvas.
            cache: As ``encode`` returned it.
            self_conditioning_logits: [B, C, vocab], the logits of the step before divided by its
                temperature; None for the first step of a canvas.

        Returns:
            Softcapped logits [B, C, vocab], fp32.
        """
        B, C = canvas.shape
        L = cache[0][0].shape[2]
        embed = self.decoder.embed_tokens
        hidden = embed(canvas)
        signal = torch.zeros_like(hidden)
        if self_conditioning_logits is not None:
            signal = self_conditioning_logits.softmax(-1) @ embed.weight * embed.embed_scale
        hidden = self.decoder.self_conditioning(hidden, signal)

        before = torch.arange(L)[None] < canvas_start[:, None]  # [B, L]
        in_window = torch.arange(L)[None] >= canvas_start[:, None] - (
            self.config.sliding_window - 1
        )
        own = torch.ones(B, C, dtype=torch.bool)
        masks = {
            "full_attention": _additive(torch.cat([before, own], 1)[:, None, None]),
            "sliding_attention": _additive(torch.cat([before & in_window, own], 1)[:, None, None]),
        }
        positions = canvas_start[:, None] + torch.arange(C)  # [B, C]
        for (qkv, rest), kind, (keys, values) in zip(
            self.weights, self.config.layer_types, cache, strict=True
        ):
            cos, sin = (table[positions] for table in self.rope[kind])
            q, k, v = _project_qkv(hidden, cos, sin, *qkv)
            k, v = torch.cat([keys, k], 2), torch.cat([values, v], 2)
            attended = _attend(q, k, v, masks[kind])
            hidden = _finish_layer(hidden, attended, *rest)
        return self.logits(self.decoder.norm(hidden))

    def logits(self, hidden: Tensor) -> Tensor:
        """Softcapped logits of normalised hidden states [..., H]."""
        cap = self.config.final_logit_softcapping
        # Rounded logits would blur the confidence that the stopping rule asks for.
        with torch.autocast("cpu", enabled=False):
            return torch.tanh(self.model.lm_head(hidden.float()) / cap) * cap


class _Rms(torch.autograd.Function):
    """Root-mean-square normalisation over the last axis, in fp32 and in few passes over memory."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        x = x.float()
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.shape[-1]
        inverse = torch.rsqrt(mean_square + RMS_EPS)
        y = x * inverse
        ctx.save_for_backward(y, inverse)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        y, inverse = ctx.saved_tensors
        along = (grad * y).mean(-1, keepdim=True)
        return torch.addcmul(grad, y, along, value=-1).mul_(inverse)


_rms = _Rms.apply


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def _qkv_weights(layer) -> tuple[Tensor, Tensor, Tensor, int]:
    attention = layer.self_attn
    matrices = [attention.q_proj.weight, attention.k_proj.weight]
    if attention.v_proj is not None:
        matrices.append(attention.v_proj.weight)
    weight = torch.cat(matrices) * layer.input_layernorm.weight
    return weight, attention.q_norm.weight, attention.k_norm.weight, attention.q_proj.out_features


def _project_qkv(
    hidden: Tensor,
    cos: Tensor,
    sin: Tensor,
    weight: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    q_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, heads, S, D], keys and values [B, kv heads, S, D] of normalised hidden states."""
    B, S, _ = hidden.shape
    D = q_scale.shape[0]
    qkv = F.linear(_rms(hidden), weight).view(B, S, -1, D)
    num_heads = q_size // D
    has_v = qkv.shape[2] - num_heads > 1
    # cos and sin gain a head axis: [S, D] or [B, S, D] -> [..., S, 1, D].
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    q = _rotate(_rms(qkv[:, :, :num_heads]) * q_scale, cos, sin)
    num_kv_heads = (qkv.shape[2] - num_heads) // 2 if has_v else 1
    normed_k = _rms(qkv[:, :, num_heads : num_heads + num_kv_heads])
    k = _rotate(normed_k * k_scale, cos, sin)
    v = _rms(qkv[:, :, num_heads + num_kv_heads :]) if has_v else normed_k
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Grouped-query attention without scaling, [B, S, heads * D].

    ``mask`` is added to the scores: 0 where a key is seen, else minus infinity.

    Written out, since the fused CPU kernel's backward pass costs more than these small products.
    """
    B, num_heads, S, D = q.shape
    num_kv_heads, K = k.shape[1], k.shape[2]
    q = q.reshape(B, num_kv_heads, -1, D)
    scores = (q @ k.transpose(-1, -2)).view(B, num_heads, S, K).float()
    weights = (scores + mask).softmax(-1).to(v.dtype)
    out = weights.view(B, num_kv_heads, -1, K) @ v
    return out.view(B, num_heads, S, D).transpose(1, 2).flatten(2)


def _layer_weights(layer) -> tuple:
    router, experts, mlp = layer.router, layer.experts, layer.mlp
    E, H, inner = experts.down_proj.shape
    fused = torch.cat(
        [
            router.proj.weight * (router.scale * router.scalar_root_size),
            mlp.gate_proj.weight * layer.pre_feedforward_layernorm.weight,
            mlp.up_proj.weight * layer.pre_feedforward_layernorm.weight,
            experts.gate_up_proj.flatten(0, 1) * layer.pre_feedforward_layernorm_2.weight,
        ]
    )
    return (
        layer.self_attn.o_proj.weight,
        layer.post_attention_layernorm.weight,
        fused,
        router.per_expert_scale,
        mlp.down_proj.weight,
        experts.down_proj.permute(1, 0, 2).reshape(H, E * inner),
        layer.post_feedforward_layernorm_1.weight,
        layer.post_feedforward_layernorm_2.weight,
        layer.post_feedforward_layernorm.weight,
        layer.router.config.top_k_experts,
    )


def _finish_layer(
    residual: Tensor,
    attended: Tensor,
    o_proj: Tensor,
    post_attention: Tensor,
    fused: Tensor,
    per_expert_scale: Tensor,
    mlp_down: Tensor,
    experts_down: Tensor,
    post_mlp: Tensor,
    post_experts: Tensor,
    post_feedforward: Tensor,
    top_k: int,
) -> Tensor:
    """Output projection, dense MLP and experts, with every norm and residual: [B, S, H]."""
    residual = residual + _rms(F.linear(attended, o_proj)) * post_attention
    E = per_expert_scale.shape[0]
    mlp_size = mlp_down.shape[1]
    expert_size = experts_down.shape[1] // E
    projected = F.linear(_rms(residual), fused)
    scores, gate, up, gate_up = projected.split(
        [E, mlp_size, mlp_size, 2 * E * expert_size], dim=-1
    )
    dense = F.linear(F.gelu(gate, approximate="tanh") * up, mlp_down)

    weights = scores.float().softmax(-1)  # [B, S, E]
    weights = torch.where(weights >= weights.topk(top_k, dim=-1).values[..., -1:], weights, 0.0)
    weights = weights / weights.sum(-1, keepdim=True) * per_expert_scale
    gate, up = gate_up.unflatten(-1, (E, 2, expert_size)).unbind(-2)  # [B, S, E, I]
    inner = F.gelu(gate, approximate="tanh") * up * weights.unsqueeze(-1)
    mixed = F.linear(inner.flatten(-2), experts_down)

    combined = _rms(dense) * post_mlp + _rms(mixed) * post_experts
    return residual + _rms(combined) * post_feedforward
