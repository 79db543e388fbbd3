"""Interface of a canvas scheduler's features: objects with the same few methods."""

from __future__ import annotations

from typing import NamedTuple

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from vllm_diffusion.canvas.canvas_view import CanvasView
from vllm_diffusion.metrics import RowCounts


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
