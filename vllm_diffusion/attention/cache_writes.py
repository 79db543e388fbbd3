"""Writing of keys and values into vLLM's paged cache."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm._custom_ops import reshape_and_cache_flash
from vllm.platforms import current_platform
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max


def write_in_pytorch(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    kv_cache_dtype: str,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Write rows as vLLM's kernels do; it waits for the device, so no graph can hold it.

    Args:
        key: [num_tokens, num_kv_heads, head_size].
        value: As ``key``.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], from :func:`split_kv_cache`.
        value_cache: As ``key_cache``.
        slot_mapping: [num_slots], int64, place of each row; -1 is padding and is not written.
        kv_cache_dtype: vLLM's name of the cache's dtype.
        k_scale: Divides keys, where the cache is FP8.
        v_scale: Divides values.
    """
    live = slot_mapping >= 0
    # Without padding, the usual pass, no row is copied to be chosen.
    chosen: Tensor | slice = slice(None) if bool(live.all()) else live
    slots = slot_mapping[chosen].long()
    block, offset = slots // key_cache.shape[1], slots % key_cache.shape[1]
    for cache, new, scale in ((key_cache, key, k_scale), (value_cache, value, v_scale)):
        rows = new[: live.shape[0]][chosen]
        if cache.dtype == FP8:
            # A conversion of its own makes NaN of what is out of range.
            rows = (rows.float() / scale).clamp(-FP8_MAX, FP8_MAX)
        cache[block, offset] = rows.to(cache.dtype)


def cache_writer(is_fp8: bool) -> Callable[..., Any]:
    """Return what writes the cache here, with the arguments of :func:`write_in_pytorch`.

    vLLM's kernels test each slot on the device, so that a captured graph can replay them. Below
    compute capability 8.9 Triton has no FP8.

    Args:
        is_fp8: True for a cache in float8_e4m3fn.
    """
    if current_platform.is_cpu():
        return write_in_pytorch
    if is_fp8 and not current_platform.has_device_capability(89):
        return reshape_and_cache_flash
    return triton_reshape_and_cache_flash


def split_kv_cache(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the keys and the values in vLLM's cache of one layer.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], any strides.

    Returns:
        Two views, [num_blocks, block_size, num_kv_heads, head_size].
    """
    keys, values = kv_cache.transpose(1, 2).chunk(2, -1)
    return keys, values
