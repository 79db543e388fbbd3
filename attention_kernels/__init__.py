"""Attention kernels for block-diffusion language models: the mathematics, knows torch only."""

from attention_kernels.canvas_attention import canvas_attention

__all__ = ["canvas_attention"]
