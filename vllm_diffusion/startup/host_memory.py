"""Memory of a machine without a GPU: what a checkpoint needs of it, and the KV cache takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import CacheConfig, ModelConfig

# Bytes beyond the weights, for Python, torch and the engine's processes.
RESERVED_BYTES = 1024**3
# KV cache when neither --kv-cache-memory-bytes nor VLLM_CPU_KVCACHE_SPACE says otherwise. vLLM's
# default, 92 % of the machine's memory, suits a machine that does nothing else.
DEFAULT_KV_CACHE_BYTES = 512 * 1024**2


def checkpoint_bytes(model: str) -> int:
    """Return the bytes of a local checkpoint's safetensors files; 0 if it is not local yet."""
    directory = Path(model)
    if not directory.is_dir():
        return 0
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def check_checkpoint_fits(model_config: ModelConfig) -> None:
    """Compare the checkpoint's size with the memory available now.

    Raises:
        ValueError: If the weights need more bytes than are available.
    """
    import psutil

    available = psutil.virtual_memory().available
    needed = checkpoint_bytes(model_config.model)
    if needed + RESERVED_BYTES > available:
        raise ValueError(
            f"The checkpoint {model_config.model} holds {needed / 2**30:.1f} GiB of weights, but "
            f"only {available / 2**30:.1f} GiB of memory are available. Free memory, or serve it "
            "on a machine with a GPU."
        )


def kv_cache_bytes(cache_config: CacheConfig) -> int:
    """Bytes of the KV cache on one rank."""
    kv_cache_space = os.environ.get("VLLM_CPU_KVCACHE_SPACE")
    if kv_cache_space:
        return int(kv_cache_space) * 1024**3
    chosen: int | None = cache_config.kv_cache_memory_bytes
    return DEFAULT_KV_CACHE_BYTES if chosen is None else chosen
