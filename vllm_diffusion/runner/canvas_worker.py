"""The worker process of a diffusion model on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_diffusion.kernel_choice.on_ranks import agree, decide
from vllm_diffusion.startup.engine_process import leaving
from vllm_diffusion.startup.plan import plan_of
from vllm_diffusion.weights.new_weights import FiniteWeights


class CanvasWorker(FiniteWeights, Worker):
    """vLLM's worker, whose model runner runs canvases."""

    def init_device(self) -> None:
        # Changed by vLLM's into the index of the GPU.
        local_rank = self.local_rank
        plan = plan_of(self.vllm_config)
        with leaving(plan.refusal_path):
            # Over before vLLM measures what memory is free.
            own = decide(self.vllm_config, local_rank)
            super().init_device()
            choices = agree(self.vllm_config, local_rank, own)
        self.model_config.diffusion = replace(plan, kernels=choices)

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
