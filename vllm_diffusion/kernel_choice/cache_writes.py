"""Check that what is written into vLLM's paged cache is what was given, and nothing else changes."""

from __future__ import annotations

import torch

from attention_kernels.checks import AttentionShape, Checked
from vllm_diffusion.attention.cache_writes import (
    FP8,
    WRITERS,
    has_triton_writer,
    split_kv_cache,
)
from vllm_diffusion.startup.kernel_choices import CacheWriter

BLOCKS, ROWS = 8, 100


def check_cache_write(shape: AttentionShape, impl: CacheWriter, device: torch.device) -> Checked:
    """Write rows to scattered slots, some of them padding, and compare the whole cache with the host's.

    Args:
        shape: Layer whose cache is written.
        impl: Kernel that is checked.
        device: Where it runs.

    Raises:
        AssertionError: If a value differs; by more than a step where the cache is FP8.
        NotImplementedError: If it cannot run on this device.
    """
    if impl == "triton" and not has_triton_writer(shape.is_fp8):
        raise NotImplementedError("Triton has no FP8 on this GPU")
    generator = torch.Generator().manual_seed(6)
    dtype = getattr(torch, shape.dtype)
    rows = torch.randn(2, ROWS, shape.num_kv_heads, shape.head_dim, generator=generator).to(dtype)
    slots = torch.randperm(BLOCKS * shape.block_size, generator=generator)[:ROWS]
    slots[::7] = -1
    cache = torch.zeros(
        BLOCKS,
        shape.num_kv_heads,
        shape.block_size,
        2 * shape.head_dim,
        dtype=FP8 if shape.is_fp8 else dtype,
    )
    # Powers of two, so that a quotient is exact.
    scales = torch.tensor([0.5, 2.0])
    name = "fp8" if shape.is_fp8 else "auto"
    there = cache.clone().to(device)
    given = (*rows.to(device), *split_kv_cache(there), slots.to(device), name, *scales.to(device))
    WRITERS[impl](*given)
    WRITERS["reference"](*rows, *split_kv_cache(cache), slots, name, *scales)
    found, expected = there.cpu().float(), cache.float()
    allowed = 2.0**-3 * expected.abs() + 2.0**-9 if shape.is_fp8 else 0.0
    difference = (found - expected).abs()
    # A comparison with what is not finite is false too.
    assert (difference <= allowed).all(), f"the cache is off by {difference.max().item():.1e}"
    num_bytes = rows.nbytes + rows.numel() * cache.itemsize
    return Checked(difference.max().item(), lambda: WRITERS[impl](*given), num_bytes, 0)
