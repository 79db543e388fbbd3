"""Paged attention where the head of a sequence is causal and its tail is a canvas."""

from attention_kernels.canvas_attention.api import Impl, WindowAnchor, canvas_attention

__all__ = ["Impl", "WindowAnchor", "canvas_attention"]
