"""Programs that each break one of CUDA's rules in plain torch, run by ``test_rules.py``.

A function raises CUDA's error, or returns the outcome. ``keeps_every_rule`` does all of it as CUDA
requires, so that a null GPU which refuses everything fails too.
"""

from contextlib import contextmanager
from typing import Any

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
