"""Constrained canvases of a scheduler's requests, and the end of requests that make no progress.

Every canvas is done after its step cap, and one that is held to a constraint settles at least one
more position in each step past it. So a request that settles nothing in as many passes as its cap
will never settle anything, whatever its settings; one whose constraint allows no token where its
canvas stands is known at once. Such a request ends with the reason, so that none keeps its slot for
ever.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.outputs import RequestError
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_diffusion.canvas.messages import CanvasConstraint, CanvasConstraints
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.metrics import PassCounters
from vllm_diffusion.scheduling.constrained_canvas import (
    ConstrainedCanvas,
    DeadEndError,
    constraint_names,
)
from vllm_diffusion.scheduling.features import ReturnedPart, SchedulerFeature


class CanvasGrammars(StructuredOutputManager):
    """vLLM's manager of grammars, for canvases: each request has the back end that its check chose.

    Stock has one back end, that of the first request, and refuses every request that needs another.
    """

    # One manager for each back end, made by `of`; they share the tokenizer and the threads.
    _managers: dict[str, StructuredOutputManager]

    @classmethod
    def of(cls, manager: StructuredOutputManager) -> None:
        """Make ``manager``, which the engine holds and has not used yet, one of this class."""
        manager.__class__ = cls
        manager._managers = {}

    def grammar_init(self, request: Request) -> None:
        name = _back_end_name(request)
        if name is None:
            return
        if name not in self._managers:
            self._managers[name] = copy.copy(self)
        StructuredOutputManager.grammar_init(self._managers[name], request)

    def back_end_of(self, request: Request) -> Any:
        """Return the back end of a request that has a grammar."""
        return self._managers[str(_back_end_name(request))].backend

    def clear_backend(self) -> None:
        """Release all back ends: each manager waits for the threads, which end once."""
        for manager in self._managers.values():
            StructuredOutputManager.clear_backend(manager)
        super().clear_backend()


def _back_end_name(request: Request) -> str | None:
    params = request.sampling_params
    constraint = None if params is None else params.structured_outputs
    return None if constraint is None else constraint._backend


# Passes that a canvas may take beyond its cap: the scheduler learns of a step in the pass after it,
# and with asynchronous scheduling the finished canvas is emitted by one more.
SLACK = 4


class StuckRequests(SchedulerFeature):
    """Feature that tracks the progress of requests, and ends requests that make none."""

    def __init__(
        self, scheduler: Scheduler, counters: PassCounters, num_settled: Callable[[str], int]
    ) -> None:
        """Start without requests.

        Args:
            scheduler: Scheduler of the requests.
            counters: Counters of the engine.
            num_settled: Returns how many leading positions of a request's canvas will not change.
        """
        self._scheduler = scheduler
        self._counters = counters
        self._num_settled = num_settled
        # By request: passes since a position was settled, and the settled positions of its canvas.
        self._idle_passes: dict[str, tuple[int, int]] = {}
        self._reasons: dict[str, str] = {}

    def observe(self, part: ReturnedPart) -> None:
        if not part.counts.projected or part.is_stale:
            return
        request, num_emitted = part.request, part.counts.num_emitted
        num_settled = self._num_settled(request.request_id)
        passes, before = self._idle_passes.get(request.request_id, (0, 0))
        passes = 0 if num_emitted or num_settled > before else passes + 1
        self._idle_passes[request.request_id] = (passes, 0 if num_emitted else num_settled)
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
            self._counters.observe_stuck_request()

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
            told = outputs.setdefault(request.client_index, EngineCoreOutputs())
            told.outputs.append(
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


logger = init_logger(f"vllm.{__name__}")


class Constraints(SchedulerFeature):
    """Constrained canvases: they give a constraint before each pass, and read its result."""

    def __init__(
        self,
        scheduler: Scheduler,
        spec: CanvasSpec,
        stuck: StuckRequests,
        max_steps_of: Callable[[Request], int],
    ) -> None:
        """Start without requests.

        Args:
            scheduler: Scheduler of the requests.
            spec: Description of canvases.
            stuck: Feature that ends requests whose constraint allows nothing more.
            max_steps_of: Returns a request's step cap.
        """
        self._scheduler = scheduler
        self._spec = spec
        self._stuck = stuck
        self._max_steps_of = max_steps_of
        self._canvases: dict[str, ConstrainedCanvas] = {}

    def __len__(self) -> int:
        """Return the number of requests with a constraint."""
        return len(self._canvases)

    def holds(self, request_id: str) -> bool:
        """Return true if a request has a constraint."""
        return request_id in self._canvases

    def num_settled(self, request_id: str) -> int:
        """Return how many leading positions of the request's canvas will not change any more."""
        canvas = self._canvases.get(request_id)
        return canvas.num_settled if canvas else 0

    def make_room(self) -> None:
        """Preempt canvases past their step cap in favour of waiting requests.

        No canvas without a constraint runs for longer, so a constraint that is slow to satisfy
        delays waiting requests no more than another request would. Such a canvas begins again
        behind them, and then runs to its end: its tokens are the same.
        """
        scheduler = self._scheduler
        if scheduler.policy != SchedulingPolicy.FCFS:
            return
        overdue = [
            request
            for request in scheduler.running
            if (canvas := self._canvases.get(request.request_id)) is not None
            and not canvas.has_given_way
            and canvas.is_overdue(self._max_steps_of(request))
        ]
        for request in overdue[: len(scheduler.waiting)]:
            self._canvases[request.request_id].has_given_way = True
            scheduler.running.remove(request)
            scheduler._preempt_request(request, time.monotonic())
            # The stock code puts it before the waiting requests.
            scheduler.waiting.remove_request(request)
            scheduler.waiting.add_request(request)

    def message(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Make the constraints for the canvases of a pass from the argmax canvases of the last one."""
        constraints: dict[str, CanvasConstraint] = {}
        for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items():
            canvas = self._canvases.get(request_id)
            if canvas is None or request_id not in self._scheduler.requests:
                continue
            request = self._scheduler.requests[request_id]
            num_given = self._spec.num_given(request.num_tokens)
            constraint = self._constraint(request, canvas, len(tokens) - num_given)
            constraints[request_id] = replace(constraint, num_given=num_given)
        if not constraints:
            return None
        nothing = np.empty((0, 0), np.int32)
        return CanvasConstraints(list(constraints), nothing, None, list(constraints.values()))

    def _constraint(
        self, request: Request, canvas: ConstrainedCanvas, width: int
    ) -> CanvasConstraint:
        """Constrain a request's canvas; a request whose constraint fails ends, and no other."""
        try:
            return canvas.constraint(width, self._max_steps_of(request))
        except DeadEndError:
            reason = "allows no token here"
        except Exception as error:
            # Each grammar's back end has exceptions of its own, which must not end the engine.
            logger.warning(
                "The constraint of request %s failed.", request.request_id, exc_info=True
            )
            reason = f"failed here ({type(error).__name__}: {error})"
        self._stuck.stop(request, f"{constraint_names(request)} {reason}")
        return CanvasConstraint((), None, restart=False, num_valid=0)

    def awaits_output(self, scheduler_output: SchedulerOutput) -> bool:
        """Return true if a canvas of a pass has a constraint that needs a pass in flight."""
        return any(
            request_id in self._canvases
            and self._scheduler.requests[request_id].num_output_placeholders > 0
            for request_id in scheduler_output.num_scheduled_tokens
        )

    def add_request(self, request: Request) -> None:
        if constraint_names(request):
            manager: Any = self._scheduler.structured_output_manager
            self._canvases[request.request_id] = ConstrainedCanvas(request, manager)

    def observe(self, part: ReturnedPart) -> None:
        canvas = self._canvases.get(part.request.request_id)
        if canvas is None:
            return
        if part.view and not part.counts.num_emitted:
            canvas.denoised(part.view.tokens.tolist())
        elif part.counts.num_emitted and not part.is_stale:
            canvas.begin()

    def preempt_request(self, request: Request) -> None:
        if canvas := self._canvases.get(request.request_id):
            canvas.begin_again()

    def remove_request(self, request_id: str) -> None:
        self._canvases.pop(request_id, None)
