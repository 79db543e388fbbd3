"""Constrained canvases of a scheduler's requests."""

from dataclasses import replace
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_diffusion.canvas.messages import AllowedTokens, CanvasGrammarOutput
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.requests.arguments import arguments_of
from vllm_diffusion.scheduling.constrained_canvas import (
    ConstrainedCanvas,
    DeadEndError,
    constraint_names,
)
from vllm_diffusion.scheduling.features import ReturnedPart, SchedulerFeature
from vllm_diffusion.scheduling.stuck_requests import StuckRequests
from vllm_diffusion.scheduling.turns import give_way

logger = init_logger(f"vllm.{__name__}")


def _has_canvas_in_flight(request: Request) -> bool:
    """Return true if a pass in flight is more than a chunk of the request's prompt."""
    return request.num_in_flight_tokens > 0 and not request.is_prefill_chunk


class Constraints(SchedulerFeature):
    """Constrained canvases: they say before each pass what it may draw, and read its result."""

    def __init__(self, scheduler: Scheduler, spec: CanvasSpec, stuck: StuckRequests) -> None:
        """Start without requests.

        Args:
            scheduler: Scheduler of the requests.
            spec: Description of canvases.
            stuck: Feature that ends requests whose constraint allows nothing more.
        """
        self._scheduler = scheduler
        self._spec = spec
        self._stuck = stuck
        self._canvases: dict[str, ConstrainedCanvas] = {}

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
        after them, and then runs to its end: its tokens are the same.
        """
        scheduler = self._scheduler
        if scheduler.policy != SchedulingPolicy.FCFS:
            return
        overdue = [
            request
            for request in scheduler.running
            if (canvas := self._canvases.get(request.request_id)) is not None
            and not canvas.has_given_way
            and canvas.is_overdue()
        ]
        for request in overdue[: len(scheduler.waiting)]:
            self._canvases[request.request_id].has_given_way = True
            give_way(scheduler, request)

    def message(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Find what the constrained canvases of a pass may draw, from the argmax canvases of the
        last one.
        """
        allowed: dict[str, AllowedTokens] = {}
        for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items():
            canvas = self._canvases.get(request_id)
            if canvas is None or request_id not in self._scheduler.requests:
                continue
            request = self._scheduler.requests[request_id]
            num_given = self._spec.num_given(request.num_tokens)
            settings = arguments_of(request.sampling_params).settings
            width = min(len(tokens) - num_given, self._spec.block_length(settings))
            if width <= 0:
                # The pass was scheduled before its block was emitted.
                continue
            found = self._allowed_tokens(request, canvas, width)
            allowed[request_id] = replace(found, num_given=num_given)
        if not allowed:
            return None
        nothing = np.empty((0, 0), np.int32)
        return CanvasGrammarOutput(list(allowed), nothing, None, list(allowed.values()))

    def _allowed_tokens(
        self, request: Request, canvas: ConstrainedCanvas, width: int
    ) -> AllowedTokens:
        """Return what a request's canvas may draw; if its constraint fails, this request alone
        ends.
        """
        try:
            return canvas.allowed_tokens(width)
        except DeadEndError as dead_end:
            reason = str(dead_end)
        except Exception as error:
            # Each grammar's back end has exceptions of its own, which must not end the engine.
            logger.warning(
                "The constraint of request %s failed.", request.request_id, exc_info=True
            )
            reason = f"failed here ({type(error).__name__}: {error})"
        self._stuck.stop(request, f"{constraint_names(request)} {reason}")
        return AllowedTokens((), None, restart=False, num_valid=0)

    def awaits_output(self, scheduler_output: SchedulerOutput) -> bool:
        """Return true if a canvas of a pass has a constraint that needs a pass in flight."""
        requests = self._scheduler.requests
        return any(
            request_id in self._canvases and _has_canvas_in_flight(requests[request_id])
            for request_id in scheduler_output.num_scheduled_tokens
        )

    def add_request(self, request: Request) -> None:
        if constraint_names(request):
            manager: Any = self._scheduler.structured_output_manager
            first = self._spec.num_given(request.num_tokens)
            arguments = arguments_of(request.sampling_params)
            held = {
                position - first: position for position in arguments.pinned if position >= first
            }
            max_steps = arguments.step_cap(self._spec)
            canvas = ConstrainedCanvas(request, manager, max_steps, held)
            self._canvases[request.request_id] = canvas

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
