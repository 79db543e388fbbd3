"""FP8 and NVFP4 numbers on a CPU: rounding, packing and unpacking."""

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
    """Return the dtype of values: bfloat16 for a bfloat16 model, else float32 (float16
    overflows).
    """
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
        [..., n] in :func:`value_dtype`, scales multiplied in: several of them meet in a sum of
        products.
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
