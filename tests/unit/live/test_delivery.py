"""Tests of what the API process takes out of the engine's outputs, and what it leaves to vLLM."""

from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsTensors

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


def test_prompt_logprobs_of_merged_answers() -> None:
    """Two answers to a prompt of which one begins later both have the prompt's log-probabilities,
    although nobody has read the outputs in between.
    """
    params = SamplingParams(n=2, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA)
    request = EngineCoreRequest("r", [5, 6], None, params, None, 0.0, None, None, None)
    request.external_req_id = "r"
    parent = ParentRequest(request)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    processor = OutputProcessor(None, log_stats=False)
    delivery.install()
    of_prompt = LogprobsTensors(
        torch.tensor([[6, 7]]), torch.tensor([[-1.0, -2.0]]), torch.tensor([1])
    )
    for i in range(2):
        name, own = parent.get_child_info(i)
        child = EngineCoreRequest(name, [5, 6], None, own, None, 0.0, None, None, None)
        child.external_req_id = "r"
        processor.add_request(child, None, parent, i, queue)
    first, second = processor.request_states
    processor.process_outputs([EngineCoreOutput(first, [8], new_prompt_logprobs_tensors=of_prompt)])
    seen = queue.get_nowait()
    assert seen is not None
    assert len(seen.prompt_logprobs) == 2
    processor.process_outputs([EngineCoreOutput(first, [9])])
    processor.process_outputs(
        [EngineCoreOutput(second, [8], new_prompt_logprobs_tensors=of_prompt)]
    )
    merged = queue.get_nowait()
    assert merged is not None
    assert [one.token_ids for one in merged.outputs] == [[9], [8]]
    assert merged.prompt_logprobs == seen.prompt_logprobs
