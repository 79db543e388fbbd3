"""vLLM's diffusion schedulers, with canvases scheduled whole or not at all, and counted."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.diffusion_scheduler import (
    DiffusionAsyncScheduler,
    DiffusionScheduler,
    diffusion_canvas_width,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_diffusion.metrics import CanvasRequestRecord, PassCounters


class WholeCanvasMixin(Scheduler):
    """Placed before a stock scheduler: see the module's docstring."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counters = PassCounters()

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Called by the stock scheduler for each request, after its last cut of ``num_new_tokens``.

        A slice of a canvas would be denoised as if the rest did not exist. A canvas that the
        token budget would cut waits for a pass with room; one that the model length cuts is as
        wide as it will ever be.
        """
        num_new_tokens = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        in_canvas = num_computed_tokens - request.num_output_placeholders >= request.num_tokens
        if not in_canvas or not request.spec_token_ids:
            return num_new_tokens
        width = min(
            len(request.spec_token_ids),
            diffusion_canvas_width(request, self.num_spec_tokens),
            self.max_model_len - num_computed_tokens,
        )
        return num_new_tokens if num_new_tokens >= width else 0

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        # Always on: the record costs a few integers per pass, and tells a user what a request took.
        request.spec_decode_metrics = CanvasRequestRecord.new(self.num_spec_tokens)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        self._count_passes(scheduler_output, model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def _count_passes(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> None:
        """Record each request's rows in this pass, before the stock code finishes any of them."""
        emitted = model_runner_output.sampled_token_ids or []
        for req_id, num_rows in scheduler_output.num_scheduled_tokens.items():
            request = self.requests.get(req_id)
            if request is None or request.is_finished():
                continue
            canvas = scheduler_output.scheduled_spec_decode_tokens.get(req_id) or ()
            index = model_runner_output.req_id_to_index[req_id]
            num_emitted = len(emitted[index]) if emitted else 0
            read_only = bool((request.sampling_params.extra_args or {}).get("diffusion_read_only"))
            self._counters.observe(
                request.spec_decode_metrics,
                num_rows=num_rows,
                is_canvas=bool(canvas),
                num_emitted=num_emitted,
                read_only=read_only,
            )

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        stats = super().make_stats(spec_decoding_stats, *args, **kwargs)
        if stats is not None:
            stats.spec_decoding_stats = self._counters.attach(
                stats.spec_decoding_stats, self.num_spec_tokens
            )
        return stats


class CanvasScheduler(WholeCanvasMixin, DiffusionScheduler):
    """Synchronous: each pass is scheduled with the last one's result in hand."""


class AsyncCanvasScheduler(WholeCanvasMixin, DiffusionAsyncScheduler):
    """Asynchronous: the next pass is scheduled while this one runs."""


def canvas_scheduler(vllm_config: VllmConfig, **kwargs: Any) -> DiffusionScheduler:
    """The scheduler of a diffusion model, chosen when vLLM has decided on asynchronous scheduling."""
    is_async = vllm_config.scheduler_config.async_scheduling
    scheduler_cls = AsyncCanvasScheduler if is_async else CanvasScheduler
    return scheduler_cls(vllm_config=vllm_config, **kwargs)
