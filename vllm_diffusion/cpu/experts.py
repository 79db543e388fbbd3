"""Mixture-of-experts layers in plain PyTorch, through vLLM's registration for other platforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.distributed import get_ep_group
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from vllm_diffusion.cpu.linear import linear

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    from vllm_diffusion.cpu.adapters import ExpertAdapters

GATES: dict[MoEActivation, Callable[[Tensor], Tensor]] = {
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: partial(F.gelu, approximate="tanh"),
}


def register() -> None:
    """Make vLLM build :class:`TorchExperts` for unquantised experts. Safe to call twice."""
    name = UnquantizedFusedMoEMethod.__name__
    if name not in op_registry_oot:
        UnquantizedFusedMoEMethod.register_oot(TorchExperts)


def routed_experts(
    layer: Any,
    hidden: Tensor,
    expert_weights: Tensor,
    expert_ids: Tensor,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Sum each token's chosen experts, with one matrix product per expert that any token chose.

    Args:
        layer: vLLM's layer of experts: its gated ``activation``, ``w13_weight`` [num_experts,
            2 * intermediate_size, hidden_size] and ``w2_weight`` [num_experts, hidden_size,
            intermediate_size].
        hidden: [num_tokens, hidden_size].
        expert_weights: [num_tokens, top_k], factor of each chosen expert's output.
        expert_ids: [num_tokens, top_k], rows of ``w13_weight``; -1 for an expert of another rank.
        adapters: LoRA adapters of these experts.

    Returns:
        [num_tokens, hidden_size] in the dtype of ``hidden``; products are summed in float32.
    """
    if layer.activation not in GATES:
        raise NotImplementedError(
            f"experts with activation {layer.activation.value} are not served on the CPU; served are "
            f"{[a.value for a in GATES]}"
        )
    activate = GATES[layer.activation]
    gate_up, down = layer.w13_weight, layer.w2_weight

    def expert(idx: int, rows: Tensor) -> Tensor:
        x = hidden[rows]
        both = linear(x, gate_up[idx])
        if adapters is not None:
            both = adapters.add(adapters.gate_up, idx, rows, x, both)
        gate, up = both.chunk(2, dim=-1)
        x = activate(gate) * up
        output = linear(x, down[idx])
        if adapters is not None:
            output = adapters.add(adapters.down, idx, rows, x, output)
        return output

    return sum_over_experts(hidden, gate_up.shape[0], expert_weights, expert_ids, expert)


def sum_over_experts(
    hidden: Tensor,
    num_experts: int,
    expert_weights: Tensor,
    expert_ids: Tensor,
    expert: Callable[[int, Tensor], Tensor],
) -> Tensor:
    """Weighted sum of each token's chosen experts.

    Args:
        hidden: [num_tokens, hidden_size].
        num_experts: Experts of this rank.
        expert_weights: [num_tokens, top_k], factor of each chosen expert's output.
        expert_ids: [num_tokens, top_k]; -1 for an expert of another rank.
        expert: An expert's index and [num_rows], int64, its tokens in, its output
            [num_rows, hidden_size] out. Called for experts that some token chose.

    Returns:
        [num_tokens, hidden_size] in the dtype of ``hidden``; summed in float32.
    """
    output = torch.zeros(hidden.shape, dtype=torch.float32)
    for idx in range(num_experts):
        token_idx, choice_idx = torch.where(expert_ids == idx)
        if token_idx.numel() == 0:
            continue
        weights = expert_weights[token_idx, choice_idx].float()
        output.index_add_(0, token_idx, expert(idx, token_idx).float() * weights[:, None])
    return output.to(hidden.dtype)


class TorchExperts(UnquantizedFusedMoEMethod):
    """Unquantised experts as a loop over matrix products."""

    def __init__(self, moe: FusedMoEConfig) -> None:
        # The stock constructor would look for a compiled CPU kernel and find none.
        FusedMoEMethodBase.__init__(self, moe)
        self.unquantized_backend = UnquantizedMoeBackend.OOT
        self.supports_pre_processed_weights = True

    @property
    def supports_internal_mk(self) -> bool:
        """Return true: ``apply`` sends a rank's own tokens to the other engines' experts by itself.

        vLLM would send router logits there: a router that reads a block at a time (LLaDA2.2) would
        then see the blocks of several engines. On a GPU a kernel does the same.
        """
        return True

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        if layer.apply_router_weight_on_input:
            raise NotImplementedError(
                "experts whose router weight multiplies their input are not served on the CPU"
            )
        parallel = self.moe.moe_parallel_config
        has_engines = parallel.dp_size > 1 or parallel.is_sequence_parallel
        if has_engines:
            x, topk_weights, topk_ids = get_ep_group().dispatch(
                x, topk_weights, topk_ids, parallel.is_sequence_parallel
            )
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids.long()]
        output = routed_experts(
            layer,
            x,
            topk_weights,
            topk_ids,
            # Which row has which adapter is known of this engine's own rows.
            None if has_engines else getattr(layer, "adapters", None),
        )
        if has_engines:
            output = get_ep_group().combine(output, parallel.is_sequence_parallel)
        return output
