"""Paged attention where the head of a sequence is causal and its tail is a canvas."""

from attention_kernels.canvas_attention.api import (
    Impl,
    Planned,
    WindowAnchor,
    canvas_attention,
    plan_canvas_attention,
    warm_up_canvas_attention,
)

__all__ = [
    "Impl",
    "Planned",
    "WindowAnchor",
    "canvas_attention",
    "plan_canvas_attention",
    "warm_up_canvas_attention",
]
