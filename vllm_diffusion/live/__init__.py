"""Canvases while they are denoised: :func:`watch` and :func:`watch_async`, and frames over HTTP."""

from vllm_diffusion.live.frame import CanvasFrame, CanvasStepMap
from vllm_diffusion.live.watch import watch, watch_async

__all__ = ["CanvasFrame", "CanvasStepMap", "watch", "watch_async"]
