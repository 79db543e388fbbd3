"""What a canvas scheduler does besides scheduling, as objects with the same few verbs."""

from __future__ import annotations

from typing import NamedTuple

from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.request import Request

from vllm_diffusion.canvas.canvas_view import CanvasView
from vllm_diffusion.metrics import RowCounts


class RequestPass(NamedTuple):
    """One request's part of a pass that came back.

    Attributes:
        request: The engine's request, before the stock scheduler takes what the pass emitted.
        counts: Rows that ran, and tokens that were emitted.
        view: What the step made of the canvas; ``None`` if nobody reads it.
        max_steps: The request's step cap.
        is_stale: Whether the request was preempted while the pass was in flight.
        is_lost: Whether what the pass did is lost with that.
    """

    request: Request
    counts: RowCounts
    view: CanvasView | None
    max_steps: int
    is_stale: bool
    is_lost: bool


class SchedulerFeature:
    """One feature; a subclass has the verbs that it needs.

    The scheduler calls them in the order in which they stand here, each for all features in turn.
    """

    def add_request(self, request: Request) -> None:
        """Take in a request that the stock scheduler has accepted."""

    def observe(self, part: RequestPass) -> None:
        """Take in a request's part of a pass, before the stock scheduler does."""

    def finish_pass(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """End what the pass decided, when the stock scheduler is done with it.

        Args:
            outputs: The pass's outputs by API process; added to.
        """

    def preempt_request(self, request: Request) -> None:
        """Forget the canvas of a request that has lost its memory; it begins anew."""

    def remove_request(self, request_id: str) -> None:
        """Forget a request that has ended."""
