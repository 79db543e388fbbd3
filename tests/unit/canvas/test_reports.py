"""Tests of the reports that leave the device for watchers, and of how they travel."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.oracles.kernel_checks import Operations
from vllm_diffusion.canvas.messages import CanvasView, ReportedFrame, RequestReport, pack
from vllm_diffusion.canvas.slots import SlotFeatures
from vllm_diffusion.canvas.step import StepOutput
from vllm_diffusion.sampling.canvas_views import CanvasViewConnector

pytestmark = pytest.mark.engine


def random_output(slots: int, length: int, generator: torch.Generator) -> StepOutput:
    """Return an output with anything that a step may return."""
    R, C = slots, length

    def flags(*shape: int) -> torch.Tensor:
        return torch.randint(0, 2, shape, generator=generator).bool()

    def numbers(*shape: int, most: int = 1000) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator, dtype=torch.int32)

    num_given = numbers(R, most=C)
    return StepOutput(
        tokens=numbers(R, C).long(),
        num_emitted=numbers(R, most=C + 1),
        num_finished=numbers(R, most=C + 1),
        denoised=flags(R),
        done=flags(R),
        step=numbers(R),
        num_given=num_given,
        kept=flags(R, C),
        decided=flags(R, C),
        decided_step=numbers(R, C),
    )


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_views(slots: int, length: int, seed: int) -> None:
    """A packed row has its slot's output without known tokens or positions after its last row."""
    generator = torch.Generator().manual_seed(seed)
    output = random_output(slots, length, generator)
    num_rows = torch.randint(0, length + 1, (slots,), generator=generator, dtype=torch.int32)
    max_steps = torch.randint(1, 100, (slots,), generator=generator, dtype=torch.int32)
    entropy = torch.rand(slots, length, generator=generator) * 20
    slot = torch.randperm(slots, generator=generator)
    began_from = torch.randint(0, 1000, (slots, length), generator=generator)
    rows = pack(output, began_from, num_rows, max_steps, entropy, slot).numpy()
    for row, s in zip(rows, slot.tolist(), strict=True):
        view = CanvasView(row)
        first, end = int(output.num_given[s]), int(num_rows[s])
        assert (view.denoised, view.done) == (bool(output.denoised[s]), bool(output.done[s]))
        assert (view.step, view.max_steps) == (int(output.step[s]), int(max_steps[s]))
        assert view.num_emitted == int(output.num_emitted[s])
        assert view.began_from.tolist() == began_from[s, :end].tolist()
        assert view.tokens.tolist() == output.tokens[s, : max(end - first, 0)].tolist()
        assert view.kept.tolist() == output.kept[s, first:end].tolist()
        assert view.decided_step.tolist() == output.decided_step[s, first:end].tolist()
        assert view.entropy.tolist() == entropy[s, first:end].tolist()


FRAMES = st.builds(
    ReportedFrame,
    block=st.integers(0, 2**31),
    step=st.integers(1, 10_000),
    max_steps=st.integers(1, 10_000),
    is_last=st.booleans(),
    begins_anew=st.booleans(),
    num_shown=st.integers(0, 1024),
    is_stopped=st.booleans(),
    is_ended=st.booleans(),
    tokens=st.binary(max_size=64),
    kept=st.binary(max_size=16),
    entropy=st.binary(max_size=64),
)


@given(
    st.builds(
        RequestReport,
        frames=st.lists(FRAMES, max_size=3),
        step_map=st.lists(st.integers(0, 10_000)),
        trace=st.lists(st.lists(st.integers(0, 2**31))),
        passes=st.lists(st.integers(0, 2**31)),
    )
)
def test_reports(report: RequestReport) -> None:
    """A decoded report equals the encoded one, from any array of its bytes."""
    array = report.encode()
    assert array.dtype == np.uint8
    assert RequestReport.decode(array) == report
    assert RequestReport.decode(np.repeat(array, 2)[::2]) == report


def test_nobody_watches() -> None:
    """A pass that nobody watches copies and allocates nothing, and vLLM gets nothing to copy."""
    num_rows, entropy = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 8)
    slots: Any = SimpleNamespace(features=SlotFeatures())
    connector = CanvasViewConnector(slots, num_rows, entropy)
    output = random_output(4, 8, torch.Generator().manual_seed(0))
    with Operations() as operations:
        connector.begin_step(None)
        connector.begin_pass()
        connector.keep(output)
        # The batch is not so much as looked at.
        assert connector.prepare_output(object()) is None  # type: ignore[arg-type]
    assert operations.count == 0


@given(st.integers(0, 4), st.sampled_from(["int16", "uint16", "uint8"]))
def test_experts_are_no_report(num_tokens: int, dtype: str) -> None:
    """The experts of an ordinary model's tokens, in the same field, are not a report."""
    assert not RequestReport.is_in(np.zeros((num_tokens, 3, 2), dtype))
    assert RequestReport.is_in(RequestReport().encode())
    assert RequestReport.is_in(np.frombuffer(RequestReport().encode().tobytes(), np.uint8))
