"""Mixture-of-experts layers on the CPU in plain PyTorch, unquantised ones and emulated formats.

Unquantised experts go through vLLM's registration for other platforms. Of quantised ones vLLM loads
the checkpoint's tensors and hands them to the experts that its *oracle* chooses for a format; an
oracle has no registration for other platforms, so the class that one of its names stands for is
replaced, on the CPU only. Experts stay compressed: each pass decompresses those that some token
chose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.distributed import get_ep_group
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_oracle
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as nvfp4_oracle
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
    kNvfp4Static,
)

from vllm_diffusion.cpu.linear import linear
from vllm_diffusion.cpu.quantized_linear import log_emulation
from vllm_diffusion.cpu.quantized_values import (
    FP8,
    quantize_fp8,
    quantize_fp8_groups,
    quantize_nvfp4,
    unpack_fp8_blocks,
    unpack_nvfp4,
    value_dtype,
)
from vllm_diffusion.hooks.replacement import replaces_call

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

    from vllm_diffusion.cpu.expert_adapters import ExpertAdapters


GATES: dict[MoEActivation, Callable[[Tensor], Tensor]] = {
    MoEActivation.SILU: F.silu,
    MoEActivation.GELU: F.gelu,
    MoEActivation.GELU_TANH: partial(F.gelu, approximate="tanh"),
}


def register() -> None:
    """Make vLLM build these experts, quantised or not. Safe to call twice."""
    if UnquantizedFusedMoEMethod.__name__ not in op_registry_oot:
        UnquantizedFusedMoEMethod.register_oot(TorchExperts)
    _fp8_experts.install()
    _nvfp4_experts.install()


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


@replaces_call(
    "vllm.model_executor.layers.fused_moe.oracle.fp8:backend_to_kernel_cls",
    reason="One of its names stands for emulated experts, on the CPU only.",
    until="Experts can be registered with the oracle, as linear kernels can with their list.",
)
def _fp8_experts(stock: Callable[..., list[type]], backend: Any) -> list[type]:
    if backend in (fp8_oracle.Fp8MoeBackend.CPU, fp8_oracle.Fp8MoeBackend.CPU_W8A8):
        # Chosen on a processor with AMX, these call kernels of vLLM's build for CPUs, which its
        # CUDA wheel lacks.
        return []
    # The layout that vLLM calls TRITON is the checkpoint's.
    return (
        [TorchFp8Experts, TorchFp8BlockExperts]
        if backend == fp8_oracle.Fp8MoeBackend.TRITON
        else stock(backend)
    )


@replaces_call(
    "vllm.model_executor.layers.fused_moe.oracle.nvfp4:backend_to_kernel_cls",
    reason="One of its names stands for emulated experts, on the CPU only.",
    until="Experts can be registered with the oracle, as linear kernels can with their list.",
)
def _nvfp4_experts(stock: Callable[..., list[type]], backend: Any) -> list[type]:
    # The layout that vLLM calls EMULATION is the checkpoint's.
    if backend == nvfp4_oracle.NvFp4MoeBackend.EMULATION:
        return [TorchNvfp4Experts, TorchNvfp4WeightOnlyExperts]
    return stock(backend)


class TorchQuantizedExperts(modular_kernel.FusedMoEExpertsModular):
    """Base of both formats' experts; a subclass computes one expert's two products.

    Attributes:
        format_name: Name of the format for the log.
        emulated: What is emulated, for the log.
        schemes: Pairs of what weights and activations are quantised to.
    """

    format_name: str
    emulated = "weights and activations"
    schemes: tuple[tuple[QuantKey, QuantKey | None], ...]

    def __init__(self, moe_config: Any, quant_config: Any, **kwargs: Any) -> None:
        super().__init__(moe_config, quant_config, **kwargs)
        log_emulation(self.format_name, self.emulated)

    @staticmethod
    def activation_format() -> modular_kernel.FusedMoEActivationFormat:
        return modular_kernel.FusedMoEActivationFormat.Standard

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def _supports_current_device() -> bool:
        return True

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in GATES

    @classmethod
    def _supports_quant_scheme(
        cls, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return (weight_key, activation_key) in cls.schemes

    @staticmethod
    def supports_lora() -> bool:
        """Without it vLLM would build no such layer where others have adapters; its own are
        refused.
        """
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> modular_kernel.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, num_tokens: int, _: int, hidden_size: int, *__: Any, **___: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        # Scratch memory is allocated where it is needed; only the output is requested.
        return (0,), (0,), (num_tokens, hidden_size)

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: Tensor | None,
        *_: Any,
        **__: Any,
    ) -> None:
        if expert_map is not None:
            topk_ids = expert_map[topk_ids.long()]

        def expert(idx: int, rows: Tensor) -> Tensor:
            both = self.product(idx, hidden_states[rows], w1[idx], is_first=True)
            gate, up = both.chunk(2, dim=-1)
            return self.product(idx, GATES[activation](gate) * up, w2[idx], is_first=False)

        output.copy_(sum_over_experts(hidden_states, w1.shape[0], topk_weights, topk_ids, expert))

    def product(self, idx: int, rows: Tensor, weight: Tensor, *, is_first: bool) -> Tensor:
        """Compute one of an expert's two products, in the dtype of its rows.

        Args:
            idx: The expert.
            rows: [num_rows, hidden_size], or [num_rows, intermediate_size] of the second product.
            weight: The expert's weight.
            is_first: True for the first product, to [num_rows, 2 * intermediate_size].
        """
        raise NotImplementedError


class TorchFp8Experts(TorchQuantizedExperts):
    """FP8: scales per channel with activations per token, or per tensor with static activations."""

    format_name = "FP8 experts"
    schemes = (
        (kFp8StaticChannelSym, kFp8DynamicTokenSym),
        (kFp8StaticTensorSym, kFp8StaticTensorSym),
    )

    def product(self, idx: int, rows: Tensor, weight: Tensor, *, is_first: bool) -> Tensor:
        weight_scale = (self.w1_scale if is_first else self.w2_scale)[idx]
        values, scale = quantize_fp8(rows, self.a1_scale if is_first else self.a2_scale)
        out = linear(values, weight.to(values.dtype)).float() * scale * weight_scale.reshape(-1)
        return out.to(rows.dtype)


class TorchFp8BlockExperts(TorchQuantizedExperts):
    """FP8: scales of blocks, with activations by groups of a token."""

    format_name = "FP8 experts with scales of blocks"

    @classmethod
    def _supports_quant_scheme(
        cls, weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        if weight_key is None or activation_key is None or weight_key.dtype != FP8:
            return False
        block, group = weight_key.scale.group_shape, activation_key.scale.group_shape
        return block.row > 1 and block.col > 1 and group.is_per_group()

    def product(self, idx: int, rows: Tensor, weight: Tensor, *, is_first: bool) -> Tensor:
        scales = (self.w1_scale if is_first else self.w2_scale)[idx]
        block = self.block_shape
        values = quantize_fp8_groups(rows, block[1])
        return linear(values, unpack_fp8_blocks(weight, scales, block, values.dtype)).to(rows.dtype)


class TorchNvfp4Experts(TorchQuantizedExperts):
    """NVFP4 weights and activations."""

    format_name = "NVFP4 experts"
    schemes = ((kNvfp4Static, kNvfp4Dynamic),)
    quantizes_input = True

    def product(self, idx: int, rows: Tensor, weight: Tensor, *, is_first: bool) -> Tensor:
        scale = (self.g1_alphas if is_first else self.g2_alphas)[idx]
        values, dtype = rows, value_dtype(rows.dtype)
        if self.quantizes_input:
            input_scale = self.a1_gscale if is_first else self.a2_gscale
            values = quantize_nvfp4(rows, input_scale)
            scale = scale / input_scale
        group_scales = (self.w1_scale if is_first else self.w2_scale)[idx]
        out = linear(values.to(dtype), unpack_nvfp4(weight, group_scales, dtype)).float() * scale
        return out.to(rows.dtype)


class TorchNvfp4WeightOnlyExperts(TorchNvfp4Experts):
    """NVFP4 weights, activations as they are."""

    emulated = "weights only"
    schemes = ((kNvfp4Static, None),)
    quantizes_input = False
