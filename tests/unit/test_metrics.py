"""Tests of the counting of passes, and of the metrics that are made of the numbers."""

from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from tests.support.engines.vllm_configs import replan, vllm_config
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.layouts import FreeCanvas, VerifiedDraft
from vllm_diffusion.metrics import (
    CanvasTotals,
    DiffusionRequestMetrics,
    DiffusionStatLogger,
    EngineCounts,
    RowCounts,
    WayTotals,
    instruments,
    metrics_of_passes,
)
from vllm_diffusion.requests.arguments import RequestArguments, attach_arguments

pytestmark = pytest.mark.engine

PROMPT, STEP, LAST = RowCounts(40, 0, 0, 0), RowCounts(0, 32, 32, 0), RowCounts(0, 32, 32, 32)
FUSED, COMMIT = RowCounts(32, 32, 32, 0), RowCounts(32, 0, 0, 32)


def spec_of(**settings: Any) -> CanvasSpec:
    """Describe the canvases of the shipped checkpoint, served with these settings."""
    config = vllm_config(additional_config={"diffusion": settings})
    spec: CanvasSpec = config.model_config.diffusion.spec
    return spec


WAYS = ["entropy_bound", "linear_spec", "autoregressive"]


def request(request_id: str = "a", way: str = "entropy_bound") -> Any:
    """Return a stand-in for the engine's request, which may choose its way."""
    params = SamplingParams()
    attach_arguments(params, RequestArguments(way=WAYS.index(way)))
    return SimpleNamespace(request_id=request_id, sampling_params=params)


def numbers(counters: EngineCounts) -> list[int]:
    stats = counters.attach(None, 32)
    return [] if stats is None else stats.num_draft_tokens_per_pos


def count(metric: str, model: str, way: str = "entropy_bound", **labels: str) -> float | None:
    labels |= {"model_name": model, "engine": "0", "way": way}
    return REGISTRY.get_sample_value(f"vllm_diffusion:{metric}", labels)


def test_canvases_and_kinds() -> None:
    """A canvas is counted with its passes when it is emitted, and each pass has one kind."""
    counters = EngineCounts(spec_of())
    for rows in (PROMPT, STEP, STEP, LAST, FUSED, LAST):
        counters.observe(request(), rows, 3)
    totals, canvases = numbers(counters)[:12], numbers(EngineCounts(spec_of()))
    assert canvases == []
    assert totals == [72, 160, 160, 5, 2, 64, 0, 0, 1, 1, 4, 1]


def test_steps_tokens_and_time_of_a_canvas() -> None:
    """A preempted canvas counts steps and time from its new start only."""
    counters = EngineCounts(spec_of())
    for rows in (PROMPT, STEP, STEP):
        counters.observe(request(), rows, 16)
    counters.forget("a")
    for rows in (PROMPT, STEP, STEP, STEP, COMMIT):
        counters.observe(request(), rows, 16)
    canvas = CanvasTotals(*numbers(counters)[12:])
    assert (canvas.steps, canvas.passes, canvas.tokens) == (3, 4, 32)
    assert canvas.microseconds >= 0
    assert numbers(counters) == []


def test_request() -> None:
    """A request's numbers are computed from its passes in order."""
    passes = [
        number
        for rows in (PROMPT, STEP, PROMPT, STEP, LAST, FUSED, LAST)
        for number in (rows.encoded, rows.denoised, rows.projected, rows.num_emitted)
    ]
    assert metrics_of_passes(passes) == DiffusionRequestMetrics(7, 112, 160, 160, (1, 2, 2))


@pytest.mark.parametrize("verifies", [True, False])
def test_kept_tokens_of_canvases(verifies: bool) -> None:
    """For drafts, the tokens kept after the certain first one are counted by position."""
    name = f"verifies {verifies}"
    config = vllm_config(served_model_name=name)
    layout = (VerifiedDraft if verifies else FreeCanvas)(8)
    spec = config.model_config.diffusion.spec
    replan(config, spec=replace(spec, ways=(replace(spec.ways[0], layout=layout),)))
    stat_logger = DiffusionStatLogger(config)
    counters = EngineCounts(config.model_config.diffusion.spec)
    for kept in (3, 1, 2):
        counters.observe(request(), RowCounts(0, 8, 8, 0), 1)
        counters.observe(request(), RowCounts(8, 0, 8, kept), 1)
    stat_logger.record(SchedulerStats(spec_decoding_stats=counters.attach(None, 8)), None)
    kept = "kept_tokens_per_position_total"
    kept_at = [count(kept, name, position=str(at)) for at in range(3)]
    assert count("verifications_total", name) == (3 if verifies else None)
    assert kept_at == ([2, 1, None] if verifies else [None] * 3)
    assert count("canvases_total", name) == 3


def test_ways_are_counted_apart() -> None:
    """If requests choose a way, numbers have its label, and only drafts count verifications."""
    config = vllm_config(served_model_name="ways", additional_config={"diffusion": {"rules": WAYS}})
    counters = EngineCounts(config.model_config.diffusion.spec)
    for rows in (PROMPT, STEP, LAST):
        counters.observe(request("a"), rows, 16)
    for rows in (RowCounts(5, 16, 17, 0), RowCounts(16, 0, 16, 3)):
        counters.observe(request("b", "linear_spec"), rows, 16)
    for rows in (RowCounts(5, 0, 1, 1), RowCounts(1, 0, 1, 1)):
        counters.observe(request("c", "autoregressive"), rows, 16)
    counters.observe_empty_answer(request("c", "autoregressive"))
    DiffusionStatLogger(config).record(
        SchedulerStats(spec_decoding_stats=counters.attach(None, 32)), None
    )

    def counts(metric: str) -> list[float | None]:
        return [count(metric, "ways", way) for way in WAYS]

    assert counts("emitted_tokens_total") == [32, 3, 2]
    assert counts("encode_rows_total") == [40, 21, 6]
    assert counts("empty_answers_total") == [0, 0, 1]
    assert counts("verifications_total") == [None, 1, None]
    # A token that is drawn alone is not a denoised canvas.
    assert counts("tokens_per_pass_count") == [1, 1, None]


def test_drafts_of_other_models() -> None:
    """The drafts of an ordinary model, in the same list, add nothing to our metrics."""
    instruments()
    config = vllm_config(shipped_checkpoint("qwen3"), served_model_name="other")
    stats = SpecDecodingStats.new(15)
    stats.observe_draft(num_draft_tokens=15, num_accepted_tokens=3)
    assert len(stats.num_draft_tokens_per_pos) > len(fields(WayTotals))
    DiffusionStatLogger(config).record(SchedulerStats(spec_decoding_stats=stats), None)
    labels = {
        sample.labels.get("model_name")
        for metric in REGISTRY.collect()
        if metric.name.startswith("vllm_diffusion:")
        for sample in metric.samples
    }
    assert "other" not in labels
