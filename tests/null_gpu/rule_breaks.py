"""Programs that break one of CUDA's rules each, in plain torch, run on the null GPU by ``test_rules.py``.

A function raises what CUDA makes of it, or returns what was there. ``keeps_every_rule`` does all of it as CUDA asks
for, so that a null GPU which refuses everything fails too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch

from tests.support.null_gpu.counts import counts_of, summary

N = 1 << 20


def device_tensor() -> torch.Tensor:
    return torch.zeros(N, device="cuda")


@contextmanager
def capture() -> Any:
    """A capture of a side stream, as torch makes one; its graph comes out."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        yield graph


def keeps_every_rule() -> dict[str, int]:
    """Copies, a forked and joined stream in a capture, events, replays; what they ask of the driver."""
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


def replays_with_other_inputs() -> list[float]:
    """What a captured copy wrote in each of two replays, between which its source changed."""
    x, y = device_tensor(), device_tensor()
    with capture() as graph:
        y.copy_(x)
    found = []
    for value in (1.0, 2.0):
        x.copy_(torch.full((N,), value))
        graph.replay()
        found.append(y[0].item())
    return found


def waits_for_the_device() -> None:
    with capture():
        torch.cuda.synchronize()


def reads_a_value() -> None:
    x = device_tensor()
    with capture():
        x.sum().item()


def copies_from_pageable_memory_in_a_capture() -> None:
    x, host = device_tensor(), torch.ones(N)
    with capture():
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        ctypes.CDLL("libcudart.so.13").cudaMemcpyAsync(
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(host.data_ptr()),
            ctypes.c_size_t(64),
            1,
            stream,
        )


def leaves_a_stream_unjoined() -> None:
    x, side = device_tensor(), torch.cuda.Stream()
    with capture():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)


def waits_for_an_event_from_outside() -> None:
    x, event = device_tensor(), torch.cuda.Event()
    event.record()
    with capture():
        torch.cuda.current_stream().wait_event(event)
        x.add_(1)


def replays_over_freed_memory() -> None:
    x, y = torch.zeros(64 * N, device="cuda"), torch.zeros(64 * N, device="cuda")
    with capture() as graph:
        y.copy_(x)
    del x, y
    torch.cuda.empty_cache()
    graph.replay()


def launches_a_triton_kernel_of_128_kib_of_shared_memory() -> None:
    _square(device_tensor(), 256)


def launches_a_triton_kernel_on_a_host_tensor() -> None:
    _square(torch.zeros(N), 32)


def _square(x: torch.Tensor, block: int) -> None:
    from tests.null_gpu.rule_kernels import square

    square[(1,)](x.half(), block, num_warps=8)


def takes_more_memory_than_there_is() -> None:
    held = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(3)]
    raise AssertionError(len(held))


def counted(name: str) -> dict[str, int]:
    """What one call asks of the driver, by kind; kinds that it did not ask for left out."""
    x, pageable = device_tensor(), torch.zeros(N)
    calls: dict[str, Callable[[], object]] = {
        "value": lambda: x[0].item(),
        "pageable": lambda: x.copy_(pageable),
        "pageable, without waiting": lambda: x.copy_(pageable, non_blocking=True),
        "index": lambda: x[torch.tensor([1, 2])],
        "mask": lambda: x[x > 0],
    }
    # What is allocated, the first time, is not what a call costs.
    calls[name]()
    return {kind: n for kind, n in summary(counts_of(calls[name])).items() if n}
