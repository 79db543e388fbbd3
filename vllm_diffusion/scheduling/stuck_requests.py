"""The end of requests that make no progress.

Every canvas is done after its step cap, and one that is held to a constraint settles at least one
more position in each step past it. So a request that settles nothing in as many passes as its cap
will never settle anything, whatever its settings. If its constraint allows no token at the
frontier, that is known at once. Such a request ends with the reason; otherwise it would keep its
slot for ever. An answer that ``max_tokens`` ends before its structured output is whole is counted
with them.
"""

from vllm.outputs import RequestError
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus

from vllm_diffusion.metrics import EngineCounts
from vllm_diffusion.scheduling.features import ReturnedPart, SchedulerFeature

# Passes that a canvas may take beyond its cap: the scheduler learns of a step in the pass after it,
# and with asynchronous scheduling the finished canvas is emitted by one more.
SLACK = 4


class StuckRequests(SchedulerFeature):
    """Feature that tracks the progress of requests, and ends requests that make none."""

    def __init__(self, scheduler: Scheduler, counters: EngineCounts) -> None:
        """Start without requests.

        Args:
            scheduler: Scheduler of the requests.
            counters: Counters of the engine.
        """
        self._scheduler = scheduler
        self._counters = counters
        # By request: passes since a position was settled, and the settled positions of its canvas.
        self._idle_passes: dict[str, tuple[int, int]] = {}
        self._reasons: dict[str, str] = {}
        # Requests with a structured output that the pass may have ended.
        self._held: list[Request] = []

    def observe(self, part: ReturnedPart) -> None:
        if not part.counts.projected or part.is_stale:
            return
        request, num_emitted, num_settled = part.request, part.counts.num_emitted, part.num_settled
        passes, before = self._idle_passes.get(request.request_id, (0, 0))
        passes = 0 if num_emitted or num_settled > before else passes + 1
        self._idle_passes[request.request_id] = (passes, 0 if num_emitted else num_settled)
        if num_emitted and request.use_structured_output:
            self._held.append(request)
        if passes > part.max_steps + SLACK:
            self.stop(request, f"no position was settled in {passes} passes")

    def stop(self, request: Request, reason: str) -> None:
        """End the request with the pass in flight.

        Args:
            request: The engine's request.
            reason: Reason for its client.
        """
        if request.request_id not in self._reasons:
            self._reasons[request.request_id] = reason
            self._counters.observe_stuck_request(request)

    def preempt_request(self, request: Request) -> None:
        self.remove_request(request.request_id)

    def remove_request(self, request_id: str) -> None:
        self._idle_passes.pop(request_id, None)
        self._reasons.pop(request_id, None)

    def finish_pass(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """End the requests that are stuck.

        An answer ends where it is, with the finish reason "length" and the reason as stop reason. A
        request without a token is refused with status 400, like one whose constraint cannot be
        compiled.

        Args:
            outputs: Outputs of the pass by API process; added to.
        """
        for request in self._held:
            if request.status == RequestStatus.FINISHED_LENGTH_CAPPED:
                # Its constraint may never have been satisfied, as that of an array without a bound.
                self._counters.observe_stuck_request(request)
        self._held.clear()
        for request_id, reason in list(self._reasons.items()):
            self.remove_request(request_id)
            request = self._scheduler.requests.get(request_id)
            if request is None or request.is_finished():
                continue
            status, error = RequestStatus.FINISHED_LENGTH_CAPPED, None
            if request.num_output_tokens == 0:
                status = RequestStatus.FINISHED_ERROR
                error = RequestError("validation_error", f"The request has no answer: {reason}.")
            self._scheduler.finish_requests(request_id, status)
            client_outputs = outputs.setdefault(request.client_index, EngineCoreOutputs())
            client_outputs.outputs.append(
                EngineCoreOutput(
                    request_id=request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=reason,
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                    error=error,
                )
            )
