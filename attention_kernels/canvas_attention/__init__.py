"""Paged attention where the head of a sequence is causal and its tail is a canvas."""

from attention_kernels.canvas_attention.api import (
    Impl,
    Planned,
    canvas_attention,
    plan_canvas_attention,
    warm_up_canvas_attention,
)
from attention_kernels.canvas_attention.batch import (
    AttentionOptions,
    PagedCache,
    Sequences,
    Window,
    WindowAnchor,
)
from attention_kernels.canvas_attention.splits import MAX_SPLITS

__all__ = [
    "MAX_SPLITS",
    "AttentionOptions",
    "Impl",
    "PagedCache",
    "Planned",
    "Sequences",
    "Window",
    "WindowAnchor",
    "canvas_attention",
    "plan_canvas_attention",
    "warm_up_canvas_attention",
]
