"""What a request, and the whole engine, took: passes, rows and denoising steps.

The scheduler counts on the host, from what it scheduled and what came back. The numbers of one
request ride to the API process in vLLM's ``RequestSpecDecodeMetrics``, whose per-step lists are
free for diffusion models; those of the engine in ``SpecDecodingStats.num_draft_tokens_per_pos``,
likewise. :func:`request_metrics` and :class:`DiffusionStatLogger` read them there.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

from prometheus_client import Counter
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_diffusion.settings.environment import environment_flags


@dataclass(frozen=True)
class PassRows:
    """One request's part of one pass.

    Attributes:
        encoded: Causal rows: of its prompt, or of a finished canvas.
        denoised: Rows of a canvas that is being denoised.
        projected: Rows projected to the vocabulary.
        num_emitted: Tokens that the pass emitted for it.
    """

    encoded: int
    denoised: int
    projected: int
    num_emitted: int


class CanvasRequestRecord(RequestSpecDecodeMetrics):
    """The trace of one request.

    ``per_step_drafted`` has three entries per pass: its causal rows (prompt and finished canvas),
    its canvas rows, its projected rows. ``per_step_accepted`` has the tokens that it emitted.
    """

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        """Called by the stock scheduler for passes with draft tokens; keeps its totals only."""
        super().observe(num_draft_tokens, num_accepted, detailed=False)

    def observe_pass(self, rows: PassRows) -> None:
        self.per_step_drafted.extend((rows.encoded, rows.denoised, rows.projected))
        self.per_step_accepted.append(rows.num_emitted)


@dataclass(frozen=True)
class DiffusionRequestMetrics:
    """What one finished request took.

    Attributes:
        passes: Forward passes in which the request had rows.
        encode_rows: Causal rows: prompt tokens computed, and tokens of finished canvases.
        canvas_rows: Rows of canvases that were being denoised.
        projected_rows: Rows that were projected to the vocabulary.
        denoise_steps_per_canvas: Steps of each canvas, in order.
    """

    passes: int
    encode_rows: int
    canvas_rows: int
    projected_rows: int
    denoise_steps_per_canvas: tuple[int, ...]


def request_metrics(completion: Any) -> DiffusionRequestMetrics | None:
    """Metrics of a finished ``CompletionOutput``; ``None`` while it is unfinished.

    Args:
        completion: One of ``RequestOutput.outputs``.
    """
    record = completion.spec_decode_metrics
    if record is None or not record.per_step_drafted:
        return None
    encoded, denoised, projected = (record.per_step_drafted[i::3] for i in range(3))
    steps: list[int] = []
    is_new_canvas = True
    for num_rows, num_emitted in zip(denoised, record.per_step_accepted, strict=True):
        if num_rows > 0:
            if is_new_canvas:
                steps.append(0)
            steps[-1] += 1
        # A request that was preempted starts its canvas anew.
        is_new_canvas = num_emitted > 0 or num_rows == 0
    return DiffusionRequestMetrics(
        passes=len(denoised),
        encode_rows=sum(encoded),
        canvas_rows=sum(denoised),
        projected_rows=sum(projected),
        denoise_steps_per_canvas=tuple(steps),
    )


@dataclass
class PassTotals:
    """Totals of the engine since the last time they were sent."""

    passes: int = 0
    encode_rows: int = 0
    canvas_rows: int = 0
    projected_rows: int = 0
    denoise_steps: int = 0
    canvases: int = 0
    stuck_requests: int = 0


class PassCounters:
    """The scheduler's side of the counting."""

    def __init__(self) -> None:
        self._totals = PassTotals()

    def observe(self, record: Any, rows: PassRows) -> None:
        """Count one request's part of one pass, in its :class:`CanvasRequestRecord` too."""
        totals = self._totals
        totals.passes += 1
        totals.encode_rows += rows.encoded
        totals.canvas_rows += rows.denoised
        totals.projected_rows += rows.projected
        totals.denoise_steps += 1 if rows.denoised else 0
        totals.canvases += 1 if rows.num_emitted else 0
        if isinstance(record, CanvasRequestRecord):
            record.observe_pass(rows)

    def observe_stuck_request(self) -> None:
        """Count a request that was ended since it settled nothing."""
        self._totals.stuck_requests += 1

    def attach(
        self, stats: SpecDecodingStats | None, num_spec_tokens: int
    ) -> SpecDecodingStats | None:
        """Move the totals into the engine's statistics of this step; ``None`` if there are none."""
        if self._totals == PassTotals():
            return stats
        if stats is None:
            stats = SpecDecodingStats.new(num_spec_tokens)
        stats.num_draft_tokens_per_pos = list(astuple(self._totals))
        self._totals = PassTotals()
        return stats


_HELP = {
    "passes": "Forward passes, counted once for each request that had rows in them.",
    "encode_rows": "Causal rows: prompt tokens and tokens of finished canvases.",
    "canvas_rows": "Rows of canvases that were being denoised.",
    "projected_rows": "Rows projected to the vocabulary.",
    "denoise_steps": "Denoising steps of canvases.",
    "canvases": "Canvases emitted.",
    "stuck_requests": "Requests that were ended since they settled nothing.",
}


class DiffusionStatLogger(StatLoggerBase):
    """Adds ``vllm_diffusion:*`` counters to the server's ``/metrics``, for diffusion models."""

    _counters: dict[str, Counter] | None = None

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        model_config = vllm_config.model_config
        self._is_diffusion = bool(
            model_config is not None
            and model_config.is_diffusion
            # Stock's scheduler counts nothing of ours.
            and not environment_flags().disabled
        )
        if not self._is_diffusion:
            return
        # One registry per process, several engines.
        if DiffusionStatLogger._counters is None:
            DiffusionStatLogger._counters = {
                name: Counter(f"vllm_diffusion:{name}", help_text, ["model_name", "engine"])
                for name, help_text in _HELP.items()
            }
        self._labels = (model_config.served_model_name, str(engine_index))

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if not self._is_diffusion or scheduler_stats is None:
            return
        stats = scheduler_stats.spec_decoding_stats
        if stats is None or len(stats.num_draft_tokens_per_pos) != len(fields(PassTotals)):
            return
        assert self._counters is not None
        for field, value in zip(fields(PassTotals), stats.num_draft_tokens_per_pos, strict=True):
            self._counters[field.name].labels(*self._labels).inc(value)

    def log_engine_initialized(self) -> None:
        """vLLM's own loggers say what is to be said at start."""

    def log(self) -> None:
        """vLLM's own logger prints a line of diffusion statistics."""
