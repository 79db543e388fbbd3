"""Kinds of attention layers, which run the same kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerKind:
    """Kind of attention layers, which run the same kernels.

    Attributes:
        num_heads: Query heads of a rank.
        num_kv_heads: Key and value heads of a rank.
        head_dim: Head size.
        window: Keys next to a row that a sliding window holds; -1 without one.
        cache_dtype: vLLM's ``kv_cache_dtype`` of the layers.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    cache_dtype: str

    @property
    def name(self) -> str:
        """Name for a reader."""
        window = "full" if self.window < 0 else f"window {self.window}"
        cache = "" if self.cache_dtype == "auto" else f", {self.cache_dtype} cache"
        heads = f"{self.num_heads} heads on {self.num_kv_heads} of {self.head_dim}"
        return f"{heads}, {window}{cache}"
