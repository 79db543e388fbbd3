"""Attention kernels for block-diffusion language models: the mathematics, knows torch only."""

from attention_kernels.canvas_attention import (
    AttentionOptions,
    PagedCache,
    Sequences,
    Window,
    canvas_attention,
)

__all__ = ["AttentionOptions", "PagedCache", "Sequences", "Window", "canvas_attention"]
