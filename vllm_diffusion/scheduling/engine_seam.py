"""Where the engine's loop asks the workers for draft tokens: a canvas scheduler needs none."""

from __future__ import annotations

from typing import Any

from vllm_diffusion.replacement import replace


def install() -> None:
    """Have the synchronous loop not ask where a :class:`CanvasScheduler` schedules.

    It asks after each pass and waits for the answer, so that with pipeline stages no pass would begin
    before the last one has ended. Safe to call twice.
    """
    from vllm.v1.engine.core import EngineCore

    replace(EngineCore, "post_step", _not_asking)


def _not_asking(stock: Any) -> Any:
    from vllm_diffusion.scheduling.canvas_scheduler import CanvasScheduler

    def post_step(self: Any, model_executed: bool) -> None:
        if not isinstance(self.scheduler, CanvasScheduler):
            stock(self, model_executed)

    return post_step
