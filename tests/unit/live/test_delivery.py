"""Tests of what the API process takes out of the engine's outputs, and what it leaves to vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor

from vllm_diffusion.canvas.messages import RequestReport
from vllm_diffusion.live import delivery

pytestmark = pytest.mark.engine


class _State:
    """The part of a request's state that receives a report."""

    def __init__(self) -> None:
        self.reports: list[RequestReport] = []

    def take(self, report: RequestReport, output: Any) -> None:
        self.reports.append(report)


def processed(
    output: EngineCoreOutput, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], _State]:
    """Return the outputs that vLLM's processor gets for one output, and the request's state."""
    seen: list[Any] = []
    monkeypatch.setattr(
        OutputProcessor, "process_outputs", lambda self, outputs: seen.extend(outputs)
    )
    processor = object.__new__(delivery.ReportingProcessor)
    processor.request_states = {output.request_id: (state := _State())}  # type: ignore[dict-item]
    processor.process_outputs([output])
    return seen, state


@pytest.mark.parametrize("dtype", ["int16", "uint8"])
@pytest.mark.parametrize("reason", [None, FinishReason.LENGTH])
def test_experts_of_another_model(
    dtype: str, reason: FinishReason | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model's engine in the process returns the experts of its tokens unchanged."""
    experts = np.arange(12).reshape(2, 3, 2).astype(dtype)
    output = EngineCoreOutput("a", [5], routed_experts=experts, finish_reason=reason)
    seen, state = processed(output, monkeypatch)
    assert seen == [output]
    assert seen[0].routed_experts is experts
    assert state.reports == []


@pytest.mark.parametrize(("tokens", "is_seen"), [([5], True), ([], False)])
def test_a_report_is_taken_out(
    tokens: list[int], is_seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request gets the report, and vLLM an output without it if there are tokens."""
    report = RequestReport(step_map=[1, 2])
    output = EngineCoreOutput("a", tokens, routed_experts=report.encode())
    seen, state = processed(output, monkeypatch)
    assert state.reports == [report]
    assert output.routed_experts is None
    assert seen == ([output] if is_seen else [])
