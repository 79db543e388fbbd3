"""The worker process of a diffusion model on a GPU."""

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

from vllm_diffusion.startup.engine_process import leaving
from vllm_diffusion.startup.gpu_record import log_unrecorded
from vllm_diffusion.startup.plan import plan_of
from vllm_diffusion.weights.new_weights import FiniteWeights


class CanvasWorker(FiniteWeights, Worker):
    """vLLM's worker, whose model runner runs canvases."""

    def init_device(self) -> None:
        with leaving(plan_of(self.vllm_config).refusal_path):
            super().init_device()
        if self.rank == 0 and current_platform.is_cuda():
            log_unrecorded(self.device.index)

    def load_model(self, **options: Any) -> None:
        with leaving(plan_of(self.vllm_config).refusal_path):
            super().load_model(**options)

    def compile_or_warm_up_model(self) -> Any:
        with self.model_runner.short_drafts():
            return super().compile_or_warm_up_model()

    def _make_model_runner(self) -> Any:
        if self.vllm_config.is_mm_encoder_only:
            return super()._make_model_runner()
        from vllm_diffusion.runner.canvas_runner import CanvasRunner

        return CanvasRunner(self.vllm_config, self.device)
