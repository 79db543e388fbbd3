"""The model runner of a diffusion model on the CPU."""

import gc
import multiprocessing

import torch
from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from vllm_diffusion.runner.canvas_runner import CanvasRunner


class CanvasCpuRunner(CanvasRunner, CPUModelRunner):
    """vLLM's runner for the CPU, with canvases."""

    @torch.inference_mode()
    def compile_step(self) -> None:
        """Compile the step before the server is ready. vLLM warms up nothing on a CPU."""
        self.sampler.compile_step()

    def shutdown(self) -> None:
        """Look for no garbage where the process ends: vLLM frees a device's memory so, and here is
        none.
        """
        if multiprocessing.parent_process() is not None:
            gc.freeze()
        super().shutdown()
