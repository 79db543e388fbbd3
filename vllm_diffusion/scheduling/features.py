"""Base of the features of a canvas scheduler, and three of them: last canvases that are kept, log-probabilities
of prompts, reads that share a pass.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from vllm_diffusion.canvas.messages import CanvasView
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.metrics import RowCounts
from vllm_diffusion.requests.arguments import arguments_of


class ReturnedPart(NamedTuple):
    """One request's part of a pass that has returned.

    Attributes:
        request: The engine's request, before the stock scheduler takes the emitted tokens.
        counts: Rows that ran, and tokens that were emitted.
        view: Result of the step for the canvas; ``None`` if no feature reads it.
        max_steps: Step cap of the request.
        is_stale: True if the request was preempted while the pass was in flight.
        is_lost: True if the result of the pass is lost by that.
    """

    request: Request
    counts: RowCounts
    view: CanvasView | None
    max_steps: int
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


class LastCanvas(SchedulerFeature):
    """Answered requests that stay for one more pass, which encodes their last canvas for a chat's next turn.

    A request's last step emits its canvas and the finish reason, and its client waits for nothing more. It then
    runs for one pass as known tokens without a canvas; their blocks are registered for the prefix cache when
    that pass is scheduled. Where memory is short it is dropped, rather than computed again for no client.
    """

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

    def __len__(self) -> int:
        """Return the number of requests whose log-probabilities are held."""
        return len(self._held)

    def hold(self, output: ModelRunnerOutput) -> None:
        """Move log-probabilities out of a pass's output, and back with the request's first tokens.

        Args:
            output: Output of the pass; changed in place.
        """
        emitted = output.sampled_token_ids or []
        both = (output.prompt_logprobs_dict, output.prompt_token_id_logprobs_dict)
        for request_id, index in output.req_id_to_index.items():
            found = tuple(part.pop(request_id, None) for part in both)
            request = self._scheduler.requests.get(request_id)
            if request is None:
                # The request ended while the pass was in flight.
                continue
            if found[0] is not None:
                found = (_without_canvas(found[0], request.num_prompt_tokens), found[1])
            if any(part is not None for part in found):
                self._held[request_id] = found
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
    return LogprobsTensors(
        logprobs.logprob_token_ids[:num_rows],
        logprobs.logprobs[:num_rows],
        logprobs.selected_token_ranks[:num_rows],
    )


# Seconds that reads of a group wait for the next one, which may never arrive if it was refused.
PATIENCE = 0.1


@dataclass
class _Group:
    missing: int
    deadline: float
    members: set[str] = field(default_factory=set)


class ReadGroups(SchedulerFeature):
    """Feature that holds reads back until their group is complete or its deadline has passed.

    Scheduled in one pass, reads compute the shared part of their prompts once: with a prefix cache a block can
    be found as soon as it is scheduled, and a pass writes all keys and values of a layer before it reads them.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}

    def add_request(self, request: Request) -> None:
        asked = arguments_of(request.sampling_params).read_group
        if asked is None:
            return
        now = time.monotonic()
        group = self._groups.setdefault(asked.name, _Group(asked.num_reads, now + PATIENCE))
        if now < group.deadline:
            group.deadline = now + PATIENCE
        group.missing -= 1
        group.members.add(request.request_id)
        self._group_of[request.request_id] = asked.name

    def holds(self, request_id: str) -> bool:
        """Return true if the request still waits for others."""
        name = self._group_of.get(request_id)
        if name is None:
            return False
        group = self._groups[name]
        return group.missing > 0 and time.monotonic() < group.deadline

    def remove_request(self, request_id: str) -> None:
        name = self._group_of.pop(request_id, None)
        if name is not None:
            group = self._groups[name]
            group.members.discard(request_id)
            if not group.members:
                del self._groups[name]
