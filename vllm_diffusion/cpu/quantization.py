"""The arithmetic of FP8 and NVFP4 in PyTorch, on values: what a GPU with units for them computes.

A quantised tensor is (values, scale) with ``tensor = values * scale``. Values are on the grid of
their format and exact in bfloat16 too (E4M3 has 4 significant bits, E2M1 times E4M3 has 6), so a
product of values is summed in float32 like on a GPU, and scales multiply its result.

FP8 is E4M3 (largest 448). NVFP4 is E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), with an
E4M3 scale for each group of 16 along the last dimension and one float32 *global scale* for the whole
tensor, which divides: ``tensor = e2m1 * e4m3 / global_scale``.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
