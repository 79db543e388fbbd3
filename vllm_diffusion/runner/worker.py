"""The worker process of a diffusion model on a GPU."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker


class CanvasWorker(Worker):
    """vLLM's worker, whose model runner runs canvases."""

    def _make_model_runner(self) -> Any:
        if self.vllm_config.is_mm_encoder_only:
            return super()._make_model_runner()
        from vllm_diffusion.runner.canvas_runner import CanvasRunner

        return CanvasRunner(self.vllm_config, self.device)
