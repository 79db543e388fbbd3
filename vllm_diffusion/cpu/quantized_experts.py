"""Quantised mixture-of-experts layers on the CPU: weights and activations emulated in PyTorch.

vLLM loads the checkpoint's tensors and hands them to the experts that its *oracle* chooses for a
format; an oracle has no registration for other platforms, so the class that stands behind one of
its names is replaced, on the CPU only. Experts stay compressed: each pass decompresses those that
some token chose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.model_executor.layers.fused_moe import modular_kernel
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_oracle
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as nvfp4_oracle
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
    kNvfp4Dynamic,
    kNvfp4Static,
)
from vllm.platforms import current_platform

from vllm_diffusion.cpu.experts import GATES, sum_over_experts
from vllm_diffusion.cpu.linear import linear
from vllm_diffusion.cpu.quantization import (
    quantize_fp8,
    quantize_nvfp4,
    unpack_nvfp4,
    value_dtype,
)
from vllm_diffusion.cpu.quantized_linear import log_emulation
from vllm_diffusion.hooks.replacement import replaces_call


def register() -> None:
    """Put these behind the oracles' names. Safe to call twice."""
    _fp8_experts.install()
    _nvfp4_experts.install()


@replaces_call(
    "vllm.model_executor.layers.fused_moe.oracle.fp8:backend_to_kernel_cls",
    reason="Emulated experts stand behind one of its names, on the CPU only.",
    until="Experts can be registered with the oracle, as linear kernels can with their list.",
)
def _fp8_experts(stock: Callable[..., list[type]], backend: Any) -> list[type]:
    # The layout that vLLM calls TRITON is the checkpoint's.
    return [TorchFp8Experts] if backend == fp8_oracle.Fp8MoeBackend.TRITON else stock(backend)


@replaces_call(
    "vllm.model_executor.layers.fused_moe.oracle.nvfp4:backend_to_kernel_cls",
    reason="Emulated experts stand behind one of its names, on the CPU only.",
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
        return bool(current_platform.is_cpu())

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
        """Without it vLLM would build no such layer where others have adapters; its own are refused."""
        return True

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return True

    def finalize_weight_and_reduce_impl(self) -> modular_kernel.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self, num_tokens: int, _: int, hidden_size: int, *__: Any, **___: Any
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        # Scratch memory is allocated where it is needed; only the output is asked for.
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
            gate, up = self.gate_up_product(idx, hidden_states[rows], w1[idx]).chunk(2, dim=-1)
            return self.down_product(idx, GATES[activation](gate) * up, w2[idx])

        output.copy_(sum_over_experts(hidden_states, w1.shape[0], topk_weights, topk_ids, expert))

    def gate_up_product(self, idx: int, rows: Tensor, weight: Tensor) -> Tensor:
        """Expert ``idx``'s first product: [num_rows, hidden] to [num_rows, 2 * intermediate]."""
        raise NotImplementedError

    def down_product(self, idx: int, rows: Tensor, weight: Tensor) -> Tensor:
        """Expert ``idx``'s second product: [num_rows, intermediate] to [num_rows, hidden]."""
        raise NotImplementedError


class TorchFp8Experts(TorchQuantizedExperts):
    """FP8: scales per channel with activations per token, or per tensor with static activations."""

    format_name = "FP8 experts"
    schemes = (
        (kFp8StaticChannelSym, kFp8DynamicTokenSym),
        (kFp8StaticTensorSym, kFp8StaticTensorSym),
    )

    def gate_up_product(self, idx: int, rows: Tensor, weight: Tensor) -> Tensor:
        return _fp8_product(rows, weight, self.w1_scale[idx], self.a1_scale)

    def down_product(self, idx: int, rows: Tensor, weight: Tensor) -> Tensor:
        return _fp8_product(rows, weight, self.w2_scale[idx], self.a2_scale)


def _fp8_product(
    rows: Tensor, weight: Tensor, weight_scale: Tensor, input_scale: Tensor | None
) -> Tensor:
    values, scale = quantize_fp8(rows, input_scale)
    out = linear(values, weight.to(values.dtype)).float() * scale * weight_scale.reshape(-1)
    return out.to(rows.dtype)


class TorchNvfp4Experts(TorchQuantizedExperts):
    """NVFP4 weights and activations."""

    format_name = "NVFP4 experts"
    schemes = ((kNvfp4Static, kNvfp4Dynamic),)

    def gate_up_product(self, idx: int, rows: Tensor, weight: Tensor) -> Tensor:
        values = quantize_nvfp4(rows, self.a1_gscale)
        scale = self.g1_alphas[idx] / self.a1_gscale
        return _nvfp4_product(values, weight, self.w1_scale[idx], scale).to(rows.dtype)

    def down_product(self, idx: int, rows: Tensor, weight: Tensor) -> Tensor:
        values = quantize_nvfp4(rows, self.a2_gscale)
        scale = self.g2_alphas[idx] / self.a2_gscale
        return _nvfp4_product(values, weight, self.w2_scale[idx], scale).to(rows.dtype)


class TorchNvfp4WeightOnlyExperts(TorchQuantizedExperts):
    """NVFP4 weights, activations as they are."""

    format_name = "NVFP4 experts"
    emulated = "weights only"
    schemes = ((kNvfp4Static, None),)

    def gate_up_product(self, idx: int, rows: Tensor, weight: Tensor) -> Tensor:
        product = _nvfp4_product(rows, weight, self.w1_scale[idx], self.g1_alphas[idx])
        return product.to(rows.dtype)

    def down_product(self, idx: int, rows: Tensor, weight: Tensor) -> Tensor:
        product = _nvfp4_product(rows, weight, self.w2_scale[idx], self.g2_alphas[idx])
        return product.to(rows.dtype)


def _nvfp4_product(rows: Tensor, weight: Tensor, group_scales: Tensor, scale: Tensor) -> Tensor:
    """Rows times a packed weight times one scale, [num_rows, out_features], float32."""
    dtype = value_dtype(rows.dtype)
    return linear(rows.to(dtype), unpack_nvfp4(weight, group_scales, dtype)).float() * scale
