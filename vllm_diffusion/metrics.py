"""Metrics of requests and of the engine: passes, rows, denoising steps and seconds.

The scheduler counts on the host, from scheduled passes and their results, apart for each way to
decode. The numbers of one request reach the API process with its last report
(``canvas/messages.py``), and its finished output holds them; those of the engine travel in
``SpecDecodingStats.num_draft_tokens_per_pos``, a list that is free for diffusion models.
:func:`request_metrics` and :class:`DiffusionStatLogger` read them.
"""

import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from functools import cache
from itertools import chain, product
from typing import Any, NamedTuple

from prometheus_client import Counter, Histogram
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.hooks.own_entry_points import own_entry_points
from vllm_diffusion.requests.arguments import arguments_of
from vllm_diffusion.startup.plan import spec_of

__all__ = ["DiffusionRequestMetrics", "request_metrics"]

# Attribute of an output that holds what was reported of its answer.
ANSWER = "diffusion_answer"


@dataclass(frozen=True)
class RowCounts:
    """One request's part of one pass.

    Attributes:
        encoded: Causal rows of its prompt or of a finished canvas.
        denoised: Rows of a canvas that is being denoised.
        projected: Rows projected to the vocabulary.
        num_emitted: Tokens that the pass emitted for it.
    """

    encoded: int
    denoised: int
    projected: int
    num_emitted: int


@dataclass(frozen=True)
class DiffusionRequestMetrics:
    """Metrics of one finished request.

    Attributes:
        passes: Forward passes in which the request had rows.
        encode_rows: Causal rows: prompt tokens computed, and tokens of finished canvases.
        canvas_rows: Rows of canvases that were being denoised.
        projected_rows: Rows that were projected to the vocabulary.
        denoise_steps_per_canvas: Steps of each canvas, in order.
        accepted_prediction_tokens: Tokens of the request's ``prediction`` that canvases started
            from and emitted.
        rejected_prediction_tokens: Those that others took the place of.
    """

    passes: int
    encode_rows: int
    canvas_rows: int
    projected_rows: int
    denoise_steps_per_canvas: tuple[int, ...]
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


def metrics_of_passes(passes: Sequence[int]) -> DiffusionRequestMetrics:
    """Compute the metrics of a request.

    Args:
        passes: The four numbers of :class:`RowCounts` for each pass, in order.
    """
    encoded, denoised, projected, emitted = (passes[i::4] for i in range(4))
    steps: list[int] = []
    is_new_canvas = True
    for num_rows, num_emitted in zip(denoised, emitted, strict=True):
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


def request_metrics(completion: Any) -> DiffusionRequestMetrics | None:
    """Return the metrics of a finished ``CompletionOutput``; ``None`` while it is unfinished.

    Args:
        completion: One of ``RequestOutput.outputs``.
    """
    answer = getattr(completion, ANSWER, None)
    return None if answer is None or completion.finish_reason is None else answer.metrics


@dataclass
class WayTotals:
    """Totals of the requests of one way since the last time they were sent."""

    encode_rows: int = 0
    canvas_rows: int = 0
    projected_rows: int = 0
    denoise_steps: int = 0
    canvases: int = 0
    emitted_tokens: int = 0
    stuck_requests: int = 0
    empty_answers: int = 0
    canvases_at_step_cap: int = 0
    encode_passes: int = 0
    denoise_passes: int = 0
    fused_passes: int = 0


class CanvasTotals(NamedTuple):
    """Totals of one canvas, from its first step until it was emitted.

    Attributes:
        steps: Number of denoising steps.
        passes: Number of passes: the steps, and the one that committed it if there was one.
        tokens: Number of emitted tokens.
        microseconds: Duration on the scheduler's clock.
        way: Place of its request's way in ``CanvasSpec.ways``.
    """

    steps: int
    passes: int
    tokens: int
    microseconds: int
    way: int


@dataclass
class _OpenCanvas:
    begun: float
    steps: int = 0
    passes: int = 0


def _way(request: Request) -> int:
    return arguments_of(request.sampling_params).way


class EngineCounts:
    """Counts of passes, canvases and requests, in the scheduler's process."""

    def __init__(self, spec: CanvasSpec) -> None:
        """Start at zero.

        Args:
            spec: Description of the server's canvases, whose ways are counted apart.
        """
        self._spec = spec
        self._totals = self._zeros()
        self._finished: list[CanvasTotals] = []
        self._open: dict[str, _OpenCanvas] = {}

    def _zeros(self) -> list[WayTotals]:
        return [WayTotals() for _ in self._spec.ways]

    def observe(self, request: Request, rows: RowCounts, max_steps: int) -> None:
        """Count one request's part of one pass.

        Args:
            request: The engine's request.
            rows: Rows that ran, and emitted tokens.
            max_steps: Step cap of the request.
        """
        way, request_id = _way(request), request.request_id
        totals = self._totals[way]
        totals.encode_rows += rows.encoded
        totals.canvas_rows += rows.denoised
        totals.projected_rows += rows.projected
        totals.encode_passes += not rows.denoised
        totals.denoise_passes += bool(rows.denoised and not rows.encoded)
        totals.fused_passes += bool(rows.denoised and rows.encoded)
        if rows.denoised:
            totals.denoise_steps += 1
            canvas = self._open.setdefault(request_id, _OpenCanvas(time.monotonic()))
            canvas.steps += 1
        if request_id in self._open:
            self._open[request_id].passes += 1
        if rows.num_emitted:
            totals.canvases += 1
            totals.emitted_tokens += rows.num_emitted
            if finished := self._open.pop(request_id, None):
                totals.canvases_at_step_cap += finished.steps >= max_steps
                microseconds = int((time.monotonic() - finished.begun) * 1e6)
                self._finished.append(
                    CanvasTotals(
                        finished.steps, finished.passes, rows.num_emitted, microseconds, way
                    )
                )

    def forget(self, request_id: str) -> None:
        """Discard the open canvas of a request that has ended or was preempted."""
        self._open.pop(request_id, None)

    def observe_stuck_request(self, request: Request) -> None:
        """Count a request that was ended because it settled nothing."""
        self._totals[_way(request)].stuck_requests += 1

    def observe_empty_answer(self, request: Request) -> None:
        """Count an answer that has no token before its end."""
        self._totals[_way(request)].empty_answers += 1

    def attach(
        self, stats: SpecDecodingStats | None, num_spec_tokens: int
    ) -> SpecDecodingStats | None:
        """Move the numbers into the engine's statistics of this step; ``None`` if there are
        none.
        """
        if self._totals == self._zeros():
            return stats
        if stats is None:
            stats = SpecDecodingStats.new(num_spec_tokens)
        totals = map(astuple, self._totals)
        stats.num_draft_tokens_per_pos = [*chain(*totals), *chain(*self._finished)]
        self._totals, self._finished = self._zeros(), []
        return stats


_HELP = {
    "encode_rows": "Causal rows: prompt tokens and tokens of finished canvases.",
    "canvas_rows": "Rows of canvases that were being denoised.",
    "projected_rows": "Rows projected to the vocabulary.",
    "denoise_steps": "Denoising steps of canvases.",
    "canvases": "Canvases emitted.",
    "emitted_tokens": "Tokens of emitted canvases.",
    "stuck_requests": "Requests that were ended since they settled nothing, or before their structured output was whole.",
    "empty_answers": "Answers that have no token before their end, or none after their thought.",
    "canvases_at_step_cap": "Canvases that took as many steps as they may.",
    "verifications": "Verified drafts of a rule whose canvases are drafts.",
}
# Counters with a label: passes by what a request had in them.
_KINDS = {"encode_passes": "encode", "denoise_passes": "denoise", "fused_passes": "fused"}
# Histograms, one value for each canvas. A canvas is at most 10,000 steps; tens of milliseconds each
# on a GPU, seconds on a CPU.
_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "denoise_steps_per_canvas": (
        "Denoising steps of a canvas.",
        (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256),
    ),
    "tokens_per_pass": (
        "Tokens of a canvas for each pass that it took.",
        (0.5, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256),
    ),
    "canvas_seconds": (
        "Seconds from a canvas's first step until it was emitted.",
        (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120),
    ),
}


@cache
def instruments() -> tuple[dict[str, Counter], dict[str, Histogram]]:
    """Return this process's counters and histograms: one set, as there is one registry for all
    engines.
    """
    labels = ["model_name", "engine", "way"]
    counters = {
        name: Counter(f"vllm_diffusion:{name}", text, labels) for name, text in _HELP.items()
    }
    counters["passes"] = Counter(
        "vllm_diffusion:passes",
        "Forward passes, counted once for each request that had rows in them, by what these were: "
        "encode (causal rows), denoise (a canvas), fused (both).",
        [*labels, "kind"],
    )
    # As vLLM's counter of a draft model has it: position 0 is the first token that may be dropped.
    counters["kept_tokens_per_position"] = Counter(
        "vllm_diffusion:kept_tokens_per_position",
        "Verifications that kept the drafted token at a position, after the certain first one.",
        [*labels, "position"],
    )
    return counters, {
        name: Histogram(f"vllm_diffusion:{name}", text, labels, buckets=buckets)
        for name, (text, buckets) in _HISTOGRAMS.items()
    }


class DiffusionStatLogger(StatLoggerBase):
    """Stat logger that adds ``vllm_diffusion:*`` metrics to ``/metrics``, of diffusion models and
    of drafts.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        model_config = vllm_config.model_config
        # Another scheduler than ours has none of these counts.
        spec = spec_of(model_config)
        self._is_diffusion = spec is not None
        self._labels = labels = (model_config.served_model_name, str(engine_index))
        watches = [
            entry.load()(vllm_config, labels)
            for entry in own_entry_points("vllm_diffusion.draft_watches")
        ]
        self._draft_watches = [watch for watch in watches if watch is not None]
        if spec is not None:
            self._counters, self._histograms = instruments()
            self._of_ways = [(*labels, way.name) for way in spec.ways]
            self._verifies = [way.layout.verifies for way in spec.ways]

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        if scheduler_stats is None:
            return
        stats = scheduler_stats.spec_decoding_stats
        if stats is not None:
            for watch in self._draft_watches:
                watch.observe(stats)
        if not self._is_diffusion:
            return
        names = [field.name for field in fields(WayTotals)]
        each = list(product(self._of_ways, names))
        if stats is None or len(stats.num_draft_tokens_per_pos) < len(each):
            return
        numbers = stats.num_draft_tokens_per_pos
        for (labels, name), value in zip(each, numbers, strict=False):
            if name in _KINDS:
                self._counters["passes"].labels(*labels, _KINDS[name]).inc(value)
            else:
                self._counters[name].labels(*labels).inc(value)
        width = len(CanvasTotals._fields)
        for start in range(len(each), len(numbers), width):
            canvas = CanvasTotals(*numbers[start : start + width])
            labels = self._of_ways[canvas.way]
            observed = {
                "denoise_steps_per_canvas": canvas.steps,
                "tokens_per_pass": canvas.tokens / canvas.passes,
                "canvas_seconds": canvas.microseconds / 1e6,
            }
            for name, value in observed.items():
                self._histograms[name].labels(*labels).observe(value)
            if self._verifies[canvas.way]:
                self._counters["verifications"].labels(*labels).inc()
                for position in range(canvas.tokens - 1):
                    self._counters["kept_tokens_per_position"].labels(*labels, str(position)).inc()

    def log_engine_initialized(self) -> None:
        """Log nothing, since vLLM's own loggers do."""

    def log(self) -> None:
        """Log nothing, since vLLM's own logger prints a line of diffusion statistics."""
