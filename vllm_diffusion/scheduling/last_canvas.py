"""Encoding of a finished request's last canvas behind its answer, for the next turn of a chat.

The request's last step emits its canvas and the finish reason, as always: the client waits for
nothing more. The request then stays running for one pass, as known tokens without a canvas; their
blocks are registered for the prefix cache when that pass is scheduled. No client waits for it, so
it is dropped rather than computed again when memory is short.
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.requests.arguments import arguments_of
from vllm_diffusion.scheduling.feature import SchedulerFeature


class LastCanvas(SchedulerFeature):
    """Answered requests that stay for one more pass, which encodes their last canvas."""

    def __init__(self, scheduler: Scheduler, spec: CanvasSpec, is_on: bool) -> None:
        """Start without requests.

        Args:
            scheduler: Scheduler of the requests.
            spec: Description of canvases.
            is_on: Setting ``keep_last_canvas``.
        """
        self._scheduler = scheduler
        self._spec = spec
        self._is_on = is_on
        self._answered: set[str] = set()

    def keeps(self, request: Request) -> bool:
        """Return true if the request is answered and has tokens left to encode."""
        return request.request_id in self._answered

    def keep(self, request: Request) -> bool:
        """Keep a request that has stopped, if a next turn could read more of it from the cache."""
        block_size = self._scheduler.block_size
        adds_block = request.num_tokens // block_size > request.num_computed_tokens // block_size
        is_worth_it = (
            self._is_on
            and adds_block
            and request.status != RequestStatus.FINISHED_ERROR
            # A read has no next turn, and neither has a request at the model's length.
            and not arguments_of(request.sampling_params).read_only
            and request.num_tokens < self._scheduler.max_model_len
        )
        if is_worth_it:
            self._answered.add(request.request_id)
        return is_worth_it

    def num_rows(self, request: Request, num_computed_tokens: int, num_granted: int) -> int:
        """Return the rows of an answered request in a pass: no canvas follows."""
        return min(num_granted, self._num_whole(request) - num_computed_tokens)

    def _num_whole(self, request: Request) -> int:
        """Return the number of tokens in whole blocks, which alone can be encoded."""
        return request.num_tokens - self._spec.num_given(request.num_tokens)

    def drop_preempted(self) -> None:
        """End answered requests that were preempted: their blocks are gone."""
        requests = self._scheduler.requests
        self._finish(
            (name for name in self._answered if requests[name].status == RequestStatus.PREEMPTED),
            RequestStatus.FINISHED_ABORTED,
        )

    def drop_all(self) -> None:
        """End all answered requests, since the cache that they would add to is reset."""
        self._finish(self._answered, RequestStatus.FINISHED_ABORTED)

    def finish_encoded(self) -> None:
        """End answered requests whose last canvas is encoded."""
        requests = self._scheduler.requests
        self._finish(
            (
                name
                for name in self._answered
                if requests[name].num_computed_tokens >= self._num_whole(requests[name])
            ),
            RequestStatus.FINISHED_STOPPED,
        )

    def _finish(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        self._scheduler.finish_requests(list(request_ids), status)

    def remove_request(self, request_id: str) -> None:
        self._answered.discard(request_id)
