"""Counting passes, and what becomes of the numbers."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_diffusion.metrics import (
    CanvasTotals,
    DiffusionRequestMetrics,
    DiffusionStatLogger,
    PassCounters,
    PassTotals,
    RowCounts,
    instruments,
    metrics_of_passes,
)

pytestmark = pytest.mark.engine

PROMPT, STEP, LAST = RowCounts(40, 0, 0, 0), RowCounts(0, 32, 32, 0), RowCounts(0, 32, 32, 32)
FUSED, COMMIT = RowCounts(32, 32, 32, 0), RowCounts(32, 0, 0, 32)


def numbers(counters: PassCounters) -> list[int]:
    stats = counters.attach(None, 32)
    return [] if stats is None else stats.num_draft_tokens_per_pos


def test_canvases_and_kinds() -> None:
    """A canvas is counted when it is emitted, with its passes; each pass is of one kind."""
    counters = PassCounters()
    for rows in (PROMPT, STEP, STEP, LAST, FUSED, LAST):
        counters.observe("a", rows, 3)
    totals, canvases = numbers(counters)[:11], numbers(PassCounters())
    assert canvases == []
    assert totals == [6, 72, 160, 160, 5, 2, 0, 1, 1, 4, 1]


def test_steps_tokens_and_time_of_a_canvas() -> None:
    """Of a canvas that was preempted only what it took from its new beginning on."""
    counters = PassCounters()
    for rows in (PROMPT, STEP, STEP):
        counters.observe("a", rows, 16)
    counters.forget("a")
    for rows in (PROMPT, STEP, STEP, STEP, COMMIT):
        counters.observe("a", rows, 16)
    canvas = CanvasTotals(*numbers(counters)[11:])
    assert (canvas.steps, canvas.passes, canvas.tokens) == (3, 4, 32)
    assert canvas.microseconds >= 0
    assert numbers(counters) == []


def test_request() -> None:
    """Numbers of a request, from its passes in order."""
    passes = [
        number
        for rows in (PROMPT, STEP, PROMPT, STEP, LAST, FUSED, LAST)
        for number in (rows.encoded, rows.denoised, rows.projected, rows.num_emitted)
    ]
    assert metrics_of_passes(passes) == DiffusionRequestMetrics(7, 112, 160, 160, (1, 2, 2))


def test_drafts_of_other_models() -> None:
    """There the list that carries our numbers counts drafts by position: nothing of ours is counted."""
    from prometheus_client import REGISTRY
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    instruments()
    model_config = SimpleNamespace(is_diffusion=False, served_model_name="other")
    config: Any = SimpleNamespace(model_config=model_config)
    stats = SpecDecodingStats.new(15)
    stats.observe_draft(num_draft_tokens=15, num_accepted_tokens=3)
    assert len(stats.num_draft_tokens_per_pos) > len(fields(PassTotals))
    DiffusionStatLogger(config).record(SimpleNamespace(spec_decoding_stats=stats), None)
    labels = {
        sample.labels.get("model_name")
        for metric in REGISTRY.collect()
        if metric.name.startswith("vllm_diffusion:")
        for sample in metric.samples
    }
    assert "other" not in labels
