"""Where the time of an engine in this process goes, stage by stage."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Stages:
    """Seconds of each stage, without those of the stages that it calls."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []
        self._since = 0.0

    @classmethod
    def of(cls, llm: Any) -> Stages:
        """Time the stages of an engine from now on."""
        from vllm_diffusion.attention.backend import CanvasAttentionImpl

        core = llm.llm_engine.engine_core.engine_core
        worker = core.model_executor.driver_worker.worker
        runner = worker.model_runner
        stages = cls()
        stages.wrap(llm.llm_engine, "step", "output: detokenising, the engine's loop")
        stages.wrap(core.scheduler, "schedule", "scheduler: schedule")
        stages.wrap(core.scheduler, "update_from_output", "scheduler: results")
        stages.wrap(worker, "execute_model", "model runner")
        stages.wrap(worker, "sample_tokens", "model runner")
        stages.wrap(runner.model_state, "prepare_inputs", "our inputs")
        stages.wrap(runner.model_state, "prepare_attn", "our inputs")
        stages.wrap(runner.model, "forward", "model, without attention")
        stages.wrap(CanvasAttentionImpl, "forward", "our attention")
        stages.wrap(CanvasAttentionImpl, "do_kv_cache_update", "our attention")
        stages.wrap(type(runner.sampler), "__call__", "our sampler")
        stages.wrap(runner.sampler.graphs.eager, "_canvas_step", "our step")
        return stages

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Count every call of ``owner.name`` as ``stage``."""
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._switch()
            self._inside.append(stage)
            try:
                return original(*args, **kwargs)
            finally:
                self._switch()
                self._inside.pop()

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call by stage, the largest first."""
        seconds = sorted(self._seconds.items(), key=lambda item: -item[1])
        self._seconds.clear()
        return dict(seconds)

    def _switch(self) -> None:
        now = time.perf_counter()
        if self._inside:
            self._seconds[self._inside[-1]] += now - self._since
        self._since = now
