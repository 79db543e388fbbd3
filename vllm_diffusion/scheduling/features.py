"""Base of the features of a canvas scheduler, and one of them: log-probabilities of prompts."""

from typing import Any, NamedTuple

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_diffusion.canvas.messages import CanvasView
from vllm_diffusion.metrics import RowCounts


class ReturnedPart(NamedTuple):
    """One request's part of a pass that has returned.

    Attributes:
        request: The engine's request, before the stock scheduler takes the emitted tokens.
        counts: Rows that ran, and tokens that were emitted.
        view: Result of the step for the canvas; ``None`` if no feature reads it.
        max_steps: Step cap of the request.
        num_settled: Leading positions of its canvas that will not change any more, before it.
        is_stale: True if the request was preempted while the pass was in flight.
        is_lost: True if the result of the pass is lost by that.
    """

    request: Request
    counts: RowCounts
    view: CanvasView | None
    max_steps: int
    num_settled: int
    is_stale: bool
    is_lost: bool


class SchedulerFeature:
    """Base of a feature; a subclass overrides the methods that it needs.

    The scheduler calls the methods in the order in which they stand here, each for all features in
    turn.
    """

    def add_request(self, request: Request) -> None:
        """Add a request that the stock scheduler has accepted."""

    def observe(self, part: ReturnedPart) -> None:
        """Record a request's part of a pass, before the stock scheduler does."""

    def finish_pass(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Complete the pass when the stock scheduler is done with it.

        Args:
            outputs: Outputs of the pass by API process; added to.
        """

    def preempt_request(self, request: Request) -> None:
        """Discard the canvas of a preempted request; it begins anew."""

    def remove_request(self, request_id: str) -> None:
        """Remove a request that has ended."""


class PromptLogprobs(SchedulerFeature):
    """Prompt log-probabilities of requests that have not emitted a token yet.

    The engine's loop takes them only together with a token, and a prompt's last pass emits none.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Start without log-probabilities.

        Args:
            scheduler: Scheduler of the requests.
        """
        self._scheduler = scheduler
        self._held: dict[str, tuple[Any, Any]] = {}

    def hold(self, output: ModelRunnerOutput) -> None:
        """Move log-probabilities out of a pass's output, and back with the request's first tokens.

        Args:
            output: Output of the pass; changed in place.
        """
        emitted = output.sampled_token_ids or []
        both = (output.prompt_logprobs_dict, output.prompt_token_id_logprobs_dict)
        if not (any(both) or self._held):
            return
        for request_id, index in output.req_id_to_index.items():
            logprobs = tuple(part.pop(request_id, None) for part in both)
            request = self._scheduler.requests.get(request_id)
            if request is None:
                # The request ended while the pass was in flight.
                continue
            if logprobs[0] is not None:
                logprobs = (_without_canvas(logprobs[0], request.num_prompt_tokens), logprobs[1])
            if any(part is not None for part in logprobs):
                self._held[request_id] = logprobs
            if emitted and emitted[index] and request_id in self._held:
                for part, held in zip(both, self._held.pop(request_id), strict=True):
                    if held is not None:
                        part[request_id] = held

    def remove_request(self, request_id: str) -> None:
        self._held.pop(request_id, None)


def _without_canvas(logprobs: LogprobsTensors, num_prompt_tokens: int) -> LogprobsTensors | None:
    """Return the rows of a prompt's tokens, without those of a canvas that shared the last pass."""
    num_rows = num_prompt_tokens - 1
    if num_rows == 0:
        return None
    return LogprobsTensors(*(part[:num_rows] for part in logprobs[:3]))
