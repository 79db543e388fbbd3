"""What the last pipeline stage tells the others: enough, in time, for nobody else's slot, and how much."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.specs import diffusion_gemma_spec, masked_spec
from vllm_diffusion.canvas.slots import CanvasSlots, NewRequest
from vllm_diffusion.requests.arguments import RequestArguments
from vllm_diffusion.runner.stage_relay import StageRelay

pytestmark = pytest.mark.engine

SLOTS, CANVAS, HIDDEN = 3, 4, 2
CPU = torch.device("cpu")


@dataclass
class Wire:
    """A process group between a last stage and a first one: what is posted is filled when it is waited for.

    Attributes:
        num_stages: Passes that a message may take.
        sent: What the last stage sent and the first has not taken, with the pass.
        num_bytes: Of all that was sent.
        now: The pass that runs.
    """

    num_stages: int
    sent: deque[tuple[int, torch.Tensor]] = field(default_factory=deque)
    num_bytes: int = 0
    now: int = 0

    def send(self, tensor: torch.Tensor) -> Any:
        self.sent.append((self.now, tensor.clone()))
        self.num_bytes += tensor.numel() * tensor.element_size()
        return SimpleNamespace(wait=lambda: None)

    def receive(self, tensor: torch.Tensor) -> Any:
        def wait() -> None:
            sent_at, sent = self.sent.popleft()
            # Not before: the last stage may still be at it.
            assert sent_at == self.now - self.num_stages
            tensor.copy_(sent)

        return SimpleNamespace(wait=wait)


class Stage:
    """One stage's canvases and relay, and what its runner would keep of each slot."""

    def __init__(
        self, wire: Wire, num_stages: int, *, has_soft_embeds: bool, is_last: bool
    ) -> None:
        spec = diffusion_gemma_spec(CANVAS) if has_soft_embeds else masked_spec(CANVAS)
        self.slots = CanvasSlots(SLOTS, spec, 2**18, CPU)
        self.soft_embeds = torch.zeros(SLOTS, CANVAS, HIDDEN) if has_soft_embeds else None
        self.num_computed = [0] * SLOTS
        self.tokens: list[list[int]] = [[] for _ in range(SLOTS)]
        stock = SimpleNamespace(broadcast_group=wire)
        self.relay = StageRelay(stock, self.slots, self.soft_embeds, num_stages)
        self.is_last = is_last

    def begin_pass(self) -> None:
        told = self.relay.get_prev_sampled_outputs()
        assert told is None or not self.is_last
        if told is not None:
            self.apply(**told)

    def apply(
        self, idx_mapping: Any, sampled_tokens: Any, num_sampled: Any, num_rejected: Any
    ) -> None:
        """As the runner's own kernel."""
        for row, slot in enumerate(idx_mapping.tolist()):
            if slot >= 0:
                self.tokens[slot] += sampled_tokens[row, : int(num_sampled[row])].tolist()
                self.num_computed[slot] -= int(num_rejected[row])

    def add(self, slot: int) -> None:
        self.slots.add_request(slot, NewRequest(RequestArguments()))
        self.slots.apply_staged_writes()
        self.num_computed[slot], self.tokens[slot] = 0, []
        if self.soft_embeds is not None:
            # A mark: nothing is read there before it is written.
            self.soft_embeds[slot] = -1.0

    def known(self, slot: int) -> list[Any]:
        """What the rows of a request's next pass are made of."""
        soft = [] if self.soft_embeds is None else self.soft_embeds[slot].tolist()
        slots = self.slots
        numbers = (slots.phase[slot], slots.step[slot])
        return [
            [int(number) for number in numbers],
            slots.canvas[slot].tolist(),
            soft,
            self.num_computed[slot],
            self.tokens[slot],
        ]


def batch_of(slots: list[int], canvas_rows: list[int]) -> Any:
    """A pass of some slots, each with that many canvas rows."""
    num_rows = np.array(canvas_rows)
    return SimpleNamespace(
        num_reqs=len(slots),
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=np.array(slots),
        num_draft_tokens=int(num_rows.sum()),
        expanded_idx_mapping=torch.from_numpy(np.repeat(slots, num_rows)).int(),
        expanded_local_pos=torch.tensor([i for count in canvas_rows for i in range(count)]).int(),
        cu_num_logits_np=np.concatenate([[0], np.cumsum(num_rows)]),
    )


def sample(last: Stage, batch: Any, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """What the sampler does to the canvases of a pass: anything."""

    def random(*shape: int, below: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=generator)

    slots = batch.idx_mapping
    last.slots.phase[slots] = random(len(slots), below=3).to(torch.int8)
    last.slots.step[slots] = random(len(slots), below=48).to(torch.int32)
    last.slots.canvas[slots] = random(len(slots), CANVAS, below=2**18)
    if last.soft_embeds is not None:
        rows = torch.rand(batch.num_draft_tokens, HIDDEN, generator=generator)
        slot, position = batch.expanded_idx_mapping.long(), batch.expanded_local_pos.long()
        last.soft_embeds[slot, position] = rows
    tokens = random(len(slots), CANVAS, below=2**18).to(torch.int32)
    num_sampled = random(len(slots), below=CANVAS + 1).to(torch.int32)
    return tokens, num_sampled, random(len(slots), below=CANVAS + 1).to(torch.int32)


@given(
    num_stages=st.integers(2, 4),
    has_soft_embeds=st.booleans(),
    seed=st.integers(0, 2**31),
    passes=st.lists(
        st.tuples(
            st.sets(st.integers(0, SLOTS - 1)),  # whose request ends or is preempted
            st.dictionaries(st.integers(0, SLOTS - 1), st.integers(0, CANVAS)),  # who runs
        ),
        max_size=30,
    ),
)
def test_first_stage_follows(num_stages, has_soft_embeds, seed, passes):
    """Before each pass the first stage knows what the last one decided of the requests in it.

    Requests end and slots change hands while messages are on their way; passes may be empty.
    """
    wire = Wire(num_stages)
    options = {"has_soft_embeds": has_soft_embeds, "num_stages": num_stages}
    first, last = (Stage(wire, is_last=is_last, **options) for is_last in (False, True))
    generator = torch.Generator().manual_seed(seed)
    expected_bytes = 0
    ran_at = [-num_stages] * SLOTS
    with pytest.MonkeyPatch.context() as patch:
        for name, on_wire in (("isend", wire.send), ("irecv", wire.receive)):
            patch.setattr(
                torch.distributed, name, lambda tensor, on_wire=on_wire, **_: on_wire(tensor)
            )
        for stage in (first, last):
            for slot in range(SLOTS):
                stage.add(slot)
        for now, (freed, running) in enumerate(passes):
            wire.now = now
            for stage in (first, last):
                stage.begin_pass()
                for slot in freed:
                    stage.relay.on_req_idx_freed(slot)
                    stage.add(slot)
            for slot in freed:
                ran_at[slot] = now - num_stages
            # The scheduler's part of the bargain.
            chosen = {s: rows for s, rows in running.items() if now - ran_at[s] >= num_stages}
            if not chosen:
                continue
            for slot in chosen:
                ran_at[slot] = now
                assert first.known(slot) == last.known(slot)
            batch = batch_of(list(chosen), list(chosen.values()))
            patch.setattr(torch.distributed, "broadcast", lambda tensor, **_: wire.receive(tensor))
            assert first.relay.receive(batch, recv_drafts=True)
            told = sample(last, batch, generator)
            patch.setattr(torch.distributed, "broadcast", lambda tensor, **_: wire.send(tensor))
            last.relay.broadcast(*told, batch)
            last.apply(batch.idx_mapping, *told)
            # As docs/operate/scaling.md counts them.
            expected_bytes += len(chosen) * (16 + 8 * CANVAS)
            expected_bytes += sum(chosen.values()) * 4 * HIDDEN * has_soft_embeds
    assert wire.num_bytes == expected_bytes
