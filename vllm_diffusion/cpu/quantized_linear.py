"""Quantised linear layers on the CPU: weights and activations emulated, registered with vLLM.

vLLM keeps loading and checking the checkpoint's tensors, and chooses among kernels registered for a
platform. Its own for the CPU need the compiled CPU extension, except for one that rounds
differently with the number of rows, so ours come first. Weights are decompressed to their values
when they are loaded; activations are quantised in each pass.

A quantised tensor is (values, scale) with ``tensor = values * scale``. Values are on the grid of
their format and exact in bfloat16 too (E4M3 has 4 significant bits, E2M1 times E4M3 has 6), so a
product of values is summed in float32 like on a GPU, and scales multiply its result.

FP8 is E4M3 (largest 448). NVFP4 is E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), with an
E4M3 scale for each group of 16 along the last dimension and one float32 *global scale* for the
whole tensor, which divides: ``tensor = e2m1 * e4m3 / global_scale``.
"""

import functools
import logging
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.kernels.linear import (
    FP8ScaledMMLinearKernel,
    FP8ScaledMMLinearLayerConfig,
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
)
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.utils import replace_parameter
from vllm.platforms.interface import PlatformEnum

from vllm_diffusion.cpu.linear import define, linear
from vllm_diffusion.cpu.quantized_values import (
    FP8,
    FP8_MAX,
    quantize_fp8,
    quantize_fp8_groups,
    quantize_nvfp4,
    unpack_fp8_blocks,
    unpack_nvfp4,
    value_dtype,
)
from vllm_diffusion.hooks.replacement import replaces

logger = logging.getLogger("vllm.vllm_diffusion")


@functools.cache
def log_emulation(what: str, how: str) -> None:
    """Say once for each kind of layer that its arithmetic is not the hardware's."""
    logger.info("%s: emulated in PyTorch on the CPU (%s)", what, how)


def register() -> None:
    """Make vLLM's kernel selection find these. Safe to call twice."""
    fp8 = kernels._POSSIBLE_FP8_KERNELS[PlatformEnum.CPU]
    if TorchFp8LinearKernel in fp8:
        return
    kernels.register_linear_kernel(TorchFp8LinearKernel, PlatformEnum.CPU, "fp8")
    # The call appends, and vLLM takes the first that can.
    fp8.insert(0, fp8.pop())
    block = kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    kernels.register_linear_kernel(TorchFp8BlockLinearKernel, PlatformEnum.CPU, "fp8_block")
    block.insert(0, block.pop())
    kernels.register_linear_kernel(TorchNvfp4LinearKernel, PlatformEnum.CPU, "nvfp4")
    # Weight-only kernels have no such call: a list by platform.
    kernels._POSSIBLE_WFP8A16_KERNELS[PlatformEnum.CPU].append(TorchFp8WeightOnlyKernel)
    _without_marlin.install()
    _define_static_quantization()


@replaces(
    "vllm.model_executor.kernels.linear:MarlinNvFp4LinearKernel",
    reason="vLLM forces this kernel for weight-only NVFP4, on any platform.",
    until="vLLM chooses among the registered kernels for weight-only NVFP4 too.",
)
def _without_marlin(stock: type) -> type:
    return TorchNvfp4LinearKernel


def _define_static_quantization() -> None:
    """The operator with which vLLM gives fused per-tensor weights one scale while it loads them."""

    def quantize(
        result: Tensor, x: Tensor, scale: Tensor, group_shape: list[int] | None = None
    ) -> None:
        if scale.numel() != 1:
            raise NotImplementedError(f"static FP8 with {scale.numel()} scales on the CPU")
        result.copy_((x.float() / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(FP8))

    define(
        "static_scaled_fp8_quant(Tensor(a!) result, Tensor input, Tensor scale, "
        "int[]? group_shape=None) -> ()",
        quantize,
        "CompositeExplicitAutograd",
    )


class _ForCpu:
    """Mixin of these kernels, which are registered for the CPU alone."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None


class TorchFp8LinearKernel(_ForCpu, FP8ScaledMMLinearKernel):
    """FP8 weights (a scale per tensor or channel) and FP8 activations (per token, or static)."""

    quantizes_input = True

    @classmethod
    def can_implement(cls, c: FP8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        weights = c.weight_quant_key.scale.group_shape
        if not (weights.is_per_tensor() or weights.is_per_channel()):
            return False, "reads weights with one scale a tensor or a channel, not blocks"
        scale = c.activation_quant_key.scale
        if not cls.quantizes_input:
            return True, None
        per_row = scale.group_shape.is_per_token() and not scale.static
        if not (per_row or (scale.group_shape.is_per_tensor() and scale.static)):
            return False, "quantises activations by token, or statically by tensor"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        log_emulation(
            "FP8 linear layers",
            "weights and activations" if self.quantizes_input else "weights only",
        )
        weight = layer.weight.data.t().to(value_dtype(self.config.input_dtype))
        replace_parameter(layer, "weight", weight.contiguous())

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        weight, weight_scale, input_scale, _ = self._get_layer_params(layer)
        if self.quantizes_input:
            values, scale = quantize_fp8(x, input_scale)
        else:
            values, scale = x.to(weight.dtype), None
        out = linear(values, weight).float() * weight_scale.reshape(-1)
        if scale is not None:
            out = out * scale
        if bias is not None:
            out = out + bias
        return out.to(self.config.out_dtype or x.dtype)

    def apply_scaled_mm(self, **_: Any) -> Tensor:
        raise AssertionError("apply_weights does not call this")


class TorchFp8BlockLinearKernel(_ForCpu, Fp8BlockScaledMMLinearKernel):
    """FP8 weights with a scale for each block, and FP8 activations with one for each group of a
    token.
    """

    def process_weights_after_loading(self, layer: Any) -> None:
        log_emulation("FP8 linear layers with scales of blocks", "weights and activations")
        params = self._get_layer_params(layer)
        shape = self.config.weight_quant_key.scale.group_shape
        dtype = value_dtype(self.config.input_dtype)
        weight = unpack_fp8_blocks(
            params.weight.data, params.block_scale.data, (shape.row, shape.col), dtype
        )
        replace_parameter(layer, "weight", weight)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
        group_size = self.config.activation_quant_key.scale.group_shape.col
        out = linear(quantize_fp8_groups(x, group_size), layer.weight).float()
        if bias is not None:
            out = out + bias
        return out.to(self.config.out_dtype or x.dtype)

    def apply_block_scaled_mm(self, *_: Any, **__: Any) -> Tensor:
        raise AssertionError("apply_weights does not call this")


class TorchFp8WeightOnlyKernel(TorchFp8LinearKernel):
    """FP8 weights with activations as they are."""

    quantizes_input = False


class TorchNvfp4LinearKernel(_ForCpu, NvFp4LinearKernel):
    """NVFP4 weights; NVFP4 activations where the layer has a scale for them."""

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        quantizes_input = hasattr(layer, "input_global_scale_inv")
        log_emulation(
            "NVFP4 linear layers",
            "weights and activations" if quantizes_input else "weights only",
        )
        values = unpack_nvfp4(
            layer.weight.data, layer.weight_scale.data, value_dtype(torch.get_default_dtype())
        )
        replace_parameter(layer, "weight", values)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        # vLLM has inverted the checkpoint's global scale of the weight: this one multiplies.
        scale = layer.weight_global_scale
        if hasattr(layer, "input_global_scale_inv"):
            values = quantize_nvfp4(x, layer.input_global_scale_inv)
            scale = scale / layer.input_global_scale_inv
        else:
            values = x
        out = linear(values.to(layer.weight.dtype), layer.weight).float() * scale
        if bias is not None:
            out = out + bias
        return out.to(x.dtype)
