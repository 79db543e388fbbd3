"""Quantised linear layers on the CPU: weights and activations emulated, registered with vLLM.

vLLM keeps loading and checking the checkpoint's tensors, and chooses among kernels registered for a
platform. Its own for the CPU need the compiled CPU extension, except for one that rounds
differently with the number of rows, so ours come first. Weights are decompressed to their values
when they are loaded; activations are quantised in each pass.

A quantised tensor is (values, scale) with ``tensor = values * scale``. Values are on the grid of
their format and exact in bfloat16 too (E4M3 has 4 significant bits, E2M1 times E4M3 has 6), so a
product of values is summed in float32 like on a GPU, and scales multiply its result.

FP8 is E4M3 (largest 448). NVFP4 is E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), with an
E4M3 scale for each group of 16 along the last dimension and one float32 *global scale* for the whole
tensor, which divides: ``tensor = e2m1 * e4m3 / global_scale``.
"""

from __future__ import annotations

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
from vllm.platforms import current_platform
from vllm.platforms.interface import PlatformEnum

from vllm_diffusion.cpu.linear import define, linear
from vllm_diffusion.hooks.replacement import replaces

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
FP4_MAX = 6.0
# Numbers of NVFP4 that share a scale.
GROUP_SIZE = 16
# The smallest scale that vLLM's kernels give a row of zeros.
_MIN_FP8_SCALE = 1.0 / (FP8_MAX * 512.0)

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_NIBBLES = torch.cat([_E2M1, -_E2M1])
# Row i holds the two numbers that byte i packs, the low half first.
_BYTES = torch.stack([_NIBBLES.repeat(16), _NIBBLES.repeat_interleave(16)], dim=1)


def value_dtype(activations: torch.dtype) -> torch.dtype:
    """Return the dtype of values: bfloat16 for a bfloat16 model, else float32 (float16 overflows)."""
    return torch.bfloat16 if activations == torch.bfloat16 else torch.float32


def quantize_fp8(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round to E4M3, ties to even.

    Args:
        x: [..., n].
        scale: One number for the tensor (static); ``None`` for one per row, from its largest entry.

    Returns:
        Values [..., n] in :func:`value_dtype`, and the scale, float32: as given, or [..., 1].
    """
    x32 = x.float()
    if scale is None:
        scale = (x32.abs().amax(-1, keepdim=True) / FP8_MAX).clamp(min=_MIN_FP8_SCALE)
    values = (x32 / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
    return values.to(value_dtype(x.dtype)), scale


def quantize_fp8_groups(x: Tensor, group_size: int) -> Tensor:
    """Round to E4M3 with a scale for each group along the last dimension, from its largest entry.

    Args:
        x: [..., n]; the last group may be shorter.
        group_size: Numbers of a group.

    Returns:
        [..., n] in :func:`value_dtype`, scales multiplied in: several of them meet in a sum of products.
    """
    size = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -size % group_size))
    values, scale = quantize_fp8(
        padded.reshape(*x.shape[:-1], padded.shape[-1] // group_size, group_size)
    )
    return (values.float() * scale).flatten(-2)[..., :size].to(value_dtype(x.dtype))


def unpack_fp8_blocks(
    weight: Tensor, scales: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """Multiply a weight with its scales.

    Args:
        weight: [n, k], E4M3.
        scales: [ceil(n / rows), ceil(k / columns)], one for each block.
        block: Rows and columns of a block; those at the edges may be smaller.
        dtype: Type of the result.

    Returns:
        [n, k].
    """
    rows, columns = weight.shape
    each = scales.float().repeat_interleave(block[0], 0)[:rows]
    return (weight.float() * each.repeat_interleave(block[1], 1)[:, :columns]).to(dtype)


def round_to_e2m1(x: Tensor) -> Tensor:
    """The nearest number of E2M1 in the dtype of ``x``, ties to the even code; clamped to +-6."""
    magnitude = x.abs().clamp(max=FP4_MAX)
    # Neighbours are 0.5, 1 or 2 apart; a tie rounds to the even multiple, whose code is even.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0)).to(x.dtype)
    return torch.copysign(torch.round(magnitude / step) * step, x)


def quantize_nvfp4(x: Tensor, global_scale: Tensor) -> Tensor:
    """Round to NVFP4, with a scale for each group from its largest entry.

    Args:
        x: [..., n], n a multiple of 16.
        global_scale: One number, float32: 448 * 6 over the largest entry that calibration saw.

    Returns:
        Values [..., n] in :func:`value_dtype`; their scale is ``1 / global_scale``.
    """
    groups = x.float().reshape(*x.shape[:-1], x.shape[-1] // GROUP_SIZE, GROUP_SIZE)
    largest = groups.abs().amax(-1, keepdim=True)
    group_scale = (global_scale * (largest / FP4_MAX)).clamp(max=FP8_MAX).to(FP8).float()
    # A group too small for any E4M3 scale reads as zeros.
    inverse = torch.where(group_scale > 0, global_scale / group_scale, 0.0)
    values = round_to_e2m1(groups * inverse) * group_scale
    return values.flatten(-2).to(value_dtype(x.dtype))


def unpack_nvfp4(packed: Tensor, group_scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Unpack the values of a weight; the tensor is these divided by its global scale.

    Args:
        packed: [..., n / 2], uint8, two numbers a byte, the first in the low half.
        group_scales: [..., n / 16], E4M3.
        dtype: Type of the result, bfloat16 or float32.

    Returns:
        [..., n].
    """
    numbers = _BYTES[packed.long()].flatten(-2)
    scales = group_scales.float().repeat_interleave(GROUP_SIZE, dim=-1)
    return (numbers * scales).to(dtype)


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


class TorchFp8LinearKernel(FP8ScaledMMLinearKernel):
    """FP8 weights (a scale per tensor or channel) and FP8 activations (per token, or static)."""

    quantizes_input = True

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return (True, None) if current_platform.is_cpu() else (False, "is for the CPU")

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


class TorchFp8BlockLinearKernel(Fp8BlockScaledMMLinearKernel):
    """FP8 weights with a scale for each block, and FP8 activations with one for each group of a token."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return (True, None) if current_platform.is_cpu() else (False, "is for the CPU")

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


class TorchNvfp4LinearKernel(NvFp4LinearKernel):
    """NVFP4 weights; NVFP4 activations where the layer has a scale for them."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return (True, None) if current_platform.is_cpu() else (False, "is for the CPU")

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
