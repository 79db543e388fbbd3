"""Encode a finished request's last canvas behind its answer, for the next turn of a chat.

The request's last step emits its canvas and the finish reason, as always: the client waits for
nothing more. The request then stays among the running ones for one pass, as known tokens without a
canvas; their blocks are registered for the prefix cache when that pass is scheduled. Nobody waits
for it, so it is dropped rather than computed again when memory is short.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.requests.params import is_read_only
from vllm_diffusion.settings.plugin_settings import plugin_settings


class LastCanvasMixin(Scheduler):
    """Placed before a synchronous canvas scheduler; without ``keep_last_canvas`` it does nothing."""

    # Of the pass that is being scheduled: that scheduler's.
    _num_rows_left: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keeps_last_canvas = plugin_settings(self.vllm_config).keep_last_canvas
        # Requests that are answered, and have tokens left to encode.
        self._answered: set[str] = set()

    def _handle_stopped_request(self, request: Request) -> bool:
        """False, as for a stock session that goes on, if the request stays to be encoded."""
        if not super()._handle_stopped_request(request):
            return False
        if self._is_worth_encoding(request):
            self._answered.add(request.request_id)
            return False
        return True

    def _is_worth_encoding(self, request: Request) -> bool:
        """Whether a next turn could read more of the request from the cache than it can now."""
        adds_block = request.num_tokens // self.block_size > (
            request.num_computed_tokens // self.block_size
        )
        return (
            self.keeps_last_canvas
            and adds_block
            and request.status != RequestStatus.FINISHED_ERROR
            # A read is no reply, and beyond the model's length there is no next turn.
            and not is_read_only(request.sampling_params)
            and request.num_tokens < self.max_model_len
        )

    def _enqueue_waiting_request(self, request: Request) -> None:
        """Called by the stock scheduler for a stopped request that goes on, once it has told it."""
        if request.request_id not in self._answered:
            super()._enqueue_waiting_request(request)
            return
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        if request.request_id in self._answered:
            # No canvas follows.
            num_rows = min(num_new_tokens, self._num_whole(request) - num_computed_tokens)
            self._num_rows_left -= num_rows
            return num_rows
        return super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens)

    def _num_whole(self, request: Request) -> int:
        """Tokens that can be encoded: of a block that the answer's end cuts none."""
        spec: CanvasSpec = self.vllm_config.model_config.canvas_spec
        return request.num_tokens - spec.num_given(request.num_tokens)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = super().schedule(throttle_prefills)
        preempted = [
            request_id
            for request_id in self._answered
            if self.requests[request_id].status == RequestStatus.PREEMPTED
        ]
        self.finish_requests(preempted, RequestStatus.FINISHED_ABORTED)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        encoded = [
            request_id
            for request_id in self._answered
            if self.requests[request_id].num_computed_tokens
            >= self._num_whole(self.requests[request_id])
        ]
        self.finish_requests(encoded, RequestStatus.FINISHED_STOPPED)
        return outputs

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        # What they would add is to be forgotten, and the blocks that they hold would forbid it.
        self.finish_requests(list(self._answered), RequestStatus.FINISHED_ABORTED)
        return super().reset_prefix_cache(*args, **kwargs)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._answered.discard(request.request_id)
        return super()._free_request(request, *args, **kwargs)
