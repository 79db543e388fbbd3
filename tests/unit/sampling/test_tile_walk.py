"""The second stream's order: what is ordered, what runs beside what, and which memory is in use."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from attention_kernels.testing import make_draws
from tests.support.heads import output_head
from vllm_diffusion.sampling import vocabulary_stream
from vllm_diffusion.sampling.output_head import one_ahead
from vllm_diffusion.sampling.row_settings import RowSettings
from vllm_diffusion.sampling.vocabulary_stream import sample_rows
from vllm_diffusion.startup.kernel_choices import KernelChoices

# Of each stream, how many of its operations are certainly over.
Clock = dict[str, int]


class FakeStream:
    """What CUDA promises of a stream, and no more: work is ordered within it and by events."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {name: 0}

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        for name, count in event.items():
            self.clock[name] = max(self.clock.get(name, 0), count)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.clock)


class FakeStreams:
    """In the place of ``torch.cuda``."""

    def __init__(self) -> None:
        self.main = self.on = FakeStream("main")
        self.operations: dict[str, tuple[str, Clock]] = {}

    def current_stream(self) -> FakeStream:
        return self.on

    def Stream(self) -> FakeStream:  # noqa: N802
        return FakeStream("second")

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.on = self.on, stream
        yield
        self.on = before

    def launch(self, operation: str) -> None:
        self.on.clock[self.on.name] += 1
        self.operations[operation] = self.on.name, dict(self.on.clock)

    def is_after(self, later: str, earlier: str) -> bool:
        stream, clock = self.operations[earlier]
        return self.operations[later][1].get(stream, 0) >= clock[stream]


@pytest.mark.parametrize("num_tiles", range(6))
def test_the_next_tile_is_projected_beside_this_one(num_tiles):
    """Each is taken after it is projected; memory is given back after it was read; nothing is left."""
    streams = FakeStreams()
    held: dict[int, Any] = {}

    def project(tile: slice) -> torch.Tensor:
        i = tile.start
        streams.launch(f"project {i}")
        logits = torch.empty(1)
        # What is allocated here may lie where anything lay that is given up.
        for j, other in held.items():
            assert other() is not None or streams.is_after(f"project {i}", f"take {j}")
        held[i] = weakref.ref(logits)
        assert sum(other() is not None for other in held.values()) <= 2
        return logits

    def take(tile: slice, logits: torch.Tensor) -> None:
        assert held[tile.start]() is logits
        streams.launch(f"take {tile.start}")

    streams.launch("before")
    one_ahead((slice(i, i + 1) for i in range(num_tiles)), project, take, streams)
    streams.launch("after")
    assert streams.on is streams.main
    assert len(streams.operations) == 2 * num_tiles + 2
    for i in range(num_tiles):
        assert streams.operations[f"project {i}"][0] == "second"
        assert streams.operations[f"take {i}"][0] == "main"
        assert streams.is_after(f"project {i}", "before")
        assert streams.is_after(f"take {i}", f"project {i}")
        assert streams.is_after("after", f"take {i}")
    for i in range(num_tiles - 1):
        following = f"project {i + 1}"
        assert not streams.is_after(following, f"take {i}")
        assert not streams.is_after(f"take {i}", following)


def test_results_are_those_of_one_stream(monkeypatch):
    """Bit for bit."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 8, generator=generator)
    rows = torch.randn(6, 8, generator=generator)
    requests = RowSettings(make_draws(6, generator))
    head = output_head(weight, 5.0)
    plain = sample_rows(head, rows, requests, 300, 64)
    fake = partial(one_ahead, streams=FakeStreams())
    monkeypatch.setattr(vocabulary_stream, "one_ahead", fake)
    overlapped = sample_rows(
        replace(head, kernels=KernelChoices(two_streams=True)), rows, requests, 300, 64
    )
    for name, values in vars(plain).items():
        if values is not None:
            assert torch.equal(values, getattr(overlapped, name)), name
