"""Which heads a tile can be cut from, and what ranks exchange."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from attention_kernels.testing import make_draws
from tests.support.heads import on_shards, output_head
from vllm_diffusion.sampling import vocabulary_stream
from vllm_diffusion.sampling.kept_rows import RowSettings
from vllm_diffusion.sampling.output_head import OutputHead, head_of, one_ahead
from vllm_diffusion.sampling.vocabulary_stream import sample_rows
from vllm_diffusion.startup.kernel_choices import KernelChoices


def test_a_quantised_head_is_refused():
    """With the name of what quantises it, and what to do."""
    lm_head = SimpleNamespace(quant_method=SimpleNamespace())
    with pytest.raises(ValueError, match="add lm_head to the ignore list"):
        OutputHead.of(lm_head, None, softcap=None, dtype=None)


def test_scaled_logits_are_refused():
    model = SimpleNamespace(logits_processor=SimpleNamespace(scale=0.5))
    with pytest.raises(ValueError, match="scales its logits"):
        head_of(model)


def test_never_drawn_ids_of_a_capped_model_are_refused():
    """The cap would make the lowest logit one like the others."""
    with pytest.raises(ValueError, match=r"softcap=30.0 .* never_drawn=\(3,\)"):
        output_head(torch.zeros(8, 2), 30.0, never_drawn=(3,))


def test_layers_hand_on_what_is_never_drawn():
    lm_head = SimpleNamespace(
        quant_method=UnquantizedEmbeddingMethod(),
        shard_indices=SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=8),
        weight=torch.zeros(8, 2),
        num_embeddings_per_partition=8,
    )
    processor = SimpleNamespace(scale=1.0, soft_cap=None, head_dtype=None)
    model = SimpleNamespace(lm_head=lm_head, logits_processor=processor)
    with mock.patch(
        "vllm_diffusion.sampling.output_head.get_tensor_model_parallel_world_size", return_value=1
    ):
        assert head_of(model).never_drawn == ()
        assert head_of(model, never_drawn=(3,)).never_drawn == (3,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("first_id", [0, 8])
def test_never_drawn_ids_are_overwritten_where_they_are(dtype, first_id):
    """In the tile and on the rank that have them, and nothing beside them; finite when divided."""
    never = (0, 3, 9, 14, 40)
    head = output_head(torch.ones(12, 2, dtype=dtype), first_id=first_id, never_drawn=never)
    ids = []
    for tile in head.tiles(4):
        logits = head.project(torch.ones(3, 2), tile)
        assert logits.dtype == dtype
        assert ((logits == 2.0) | (logits <= -65504.0)).all()
        assert (logits.float() / 1e-4).isfinite().all()
        assert torch.equal(logits, logits[:1].expand(3, -1))
        ids += [first_id + tile.start + i for i in (logits[0] < 0).nonzero()[:, 0].tolist()]
    assert ids == [token for token in never if first_id <= token < first_id + 12]


def test_a_view_with_gaps_is_summed_whole():
    """As the sweeps of a filter's threshold hand it over on a CPU: all but the first column."""
    numbers = torch.arange(64 * 17).view(64, 17)

    def summed(head: OutputHead) -> torch.Tensor:
        return head.sum(numbers.clone()[:, 1:])

    for total in on_shards(torch.zeros(8, 1), [4], None, summed):
        assert torch.equal(total, 2 * numbers[:, 1:])


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
