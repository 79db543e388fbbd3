"""The model runner of a diffusion model on the CPU."""

from __future__ import annotations

from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from vllm_diffusion.runner.canvas_runner import CanvasRunner


class CanvasCpuRunner(CanvasRunner, CPUModelRunner):
    """vLLM's runner for the CPU, with canvases."""
