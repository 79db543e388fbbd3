"""The null GPU keeps CUDA's rules: a program in plain torch that breaks one gets CUDA's error.

A program raises the error, or returns the outcome. ``keeps_every_rule`` does all of it as CUDA
requires, so that a null GPU which refuses everything fails too.
"""

from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.support.null_gpu.counts import counts_of, summary

N = 1 << 20


def device_tensor() -> torch.Tensor:
    return torch.zeros(N, device="cuda")


@contextmanager
def capture() -> Any:
    """Capture a side stream, as torch does, and return its graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        yield graph


def keeps_every_rule() -> dict[str, int]:
    """Run copies, a forked capture, events and replays; return the driver's counts."""
    x = device_tensor()
    pinned = torch.ones(N).pin_memory()
    side = torch.cuda.Stream()
    inside, after = torch.cuda.Event(), torch.cuda.Event(enable_timing=True)

    def work() -> None:
        with capture() as graph:
            y = x + 1
            inside.record()
            side.wait_event(inside)
            with torch.cuda.stream(side):
                z = x * 2
            torch.cuda.current_stream().wait_stream(side)
            x.copy_(y + z)
        graph.replay()
        graph.replay()
        x.copy_(pinned, non_blocking=True)
        after.record()
        after.synchronize()
        assert x.sum().item() == 0.0  # kernels do nothing
        torch.cuda.synchronize()

    found = summary(counts_of(work))
    assert x.cpu().tolist()[:2] == [1.0, 1.0]  # and copies do
    return {kind: n for kind, n in found.items() if n}


def waits_for_the_device() -> None:
    with capture():
        torch.cuda.synchronize()


def leaves_a_stream_unjoined() -> None:
    x, side = device_tensor(), torch.cuda.Stream()
    with capture():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)


def replays_over_freed_memory() -> None:
    x, y = torch.zeros(64 * N, device="cuda"), torch.zeros(64 * N, device="cuda")
    with capture() as graph:
        y.copy_(x)
    del x, y
    torch.cuda.empty_cache()
    graph.replay()


# As CUDA's documentation names them.
ERRORS = {
    waits_for_the_device: "cudaErrorStreamCaptureUnsupported",
    leaves_a_stream_unjoined: "cudaErrorStreamCaptureUnjoined",
    replays_over_freed_memory: "cudaErrorIllegalAddress",
}


@pytest.mark.parametrize(("program", "error"), ERRORS.items(), ids=ERRORS.values())
def test_a_broken_rule(torch_alone, program, error):
    """A program that breaks a rule ends with CUDA's error for it."""
    outcome = torch_alone.run(f"{__name__}:{program.__name__}", seconds=60)
    assert outcome.error is not None, outcome.value
    assert error in outcome.text()


def test_a_kept_rule(torch_alone):
    """A program that keeps every rule is not refused, and everything is counted."""
    assert torch_alone.run(f"{__name__}:keeps_every_rule", seconds=60).checked() == {
        "graphs": 2,
        "kernels_in_graphs": 6,
        "copies_in_graphs": 2,
        # A sum, and the memory that its blocks meet in.
        "kernels": 1,
        "memsets": 1,
        # Of the pinned tensor, and of the sum, which is waited for.
        "copies": 2,
        "waits_for_streams": 1,
        "waits_for_events": 1,
        # The one that is requested, and torch's before a capture.
        "waits_for_the_device": 2,
        "allocations": 4,
    }
