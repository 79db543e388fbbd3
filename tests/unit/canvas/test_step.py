"""The compiled step: one graph for any number of requests, and the same as eager."""

from __future__ import annotations

import pytest
import torch

from vllm_diffusion.canvas.slots import CanvasSlots, DenoisingDefaults
from vllm_diffusion.canvas.step import (
    SlotStatistics,
    make_canvas_step,
    uniform_noise,
)
from vllm_diffusion.decoding.entropy_bound import entropy_bound_policy
from vllm_diffusion.requests.params import CanvasParams

pytestmark = pytest.mark.engine

SLOTS, CANVAS, VOCAB = 5, 8, 50


def new_slots() -> CanvasSlots:
    slots = CanvasSlots(
        SLOTS, CANVAS, DenoisingDefaults(4, 0.4, 0.8, 0.1, 0.005, 1), torch.device("cpu")
    )
    for slot in range(SLOTS):
        slots.add_request(slot, CanvasParams(), 0)
    slots.apply_staged_writes()
    return slots


def run(backend: str | None) -> tuple[list[torch.Tensor], list[int]]:
    """A life of several canvases with 0 to all slots active, as canvases and emitted counts."""
    slots = new_slots()
    step = make_canvas_step(
        slots, entropy_bound_policy, uniform_noise(VOCAB), compile_backend=backend
    )
    generator = torch.Generator().manual_seed(0)
    seeds = torch.arange(SLOTS)
    canvases, emitted = [], []
    for i in range(14):
        statistics = SlotStatistics(
            argmax=torch.randint(0, VOCAB, (SLOTS, CANVAS), generator=generator),
            candidate=torch.randint(0, VOCAB, (SLOTS, CANVAS), generator=generator),
            entropy=torch.rand(SLOTS, CANVAS, generator=generator),
            confidence=torch.rand(SLOTS, CANVAS, generator=generator),
            drawn_confidence=torch.rand(SLOTS, CANVAS, generator=generator),
        )
        num_rows = torch.zeros(SLOTS, dtype=torch.int32)
        num_rows[: i % (SLOTS + 1)] = CANVAS if i else 0
        starting = torch.arange(SLOTS) >= 0 if i == 0 else torch.zeros(SLOTS, dtype=torch.bool)
        none = torch.zeros(SLOTS, dtype=torch.int32)
        output = step(statistics, num_rows, starting, seeds, none - 1, none, none)
        canvases.append(slots.canvas.clone())
        emitted.append(int(output.num_emitted.sum()))
    return canvases, emitted


def test_compiled_once_and_equal_to_eager():
    """A recompilation for another number of active requests would be an error here."""
    eager_canvases, eager_emitted = run(None)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        canvases, emitted = run("eager")
    assert emitted == eager_emitted
    assert sum(emitted) > 0
    for compiled, eager in zip(canvases, eager_canvases, strict=True):
        assert torch.equal(compiled, eager)


@pytest.mark.parametrize("converge_at_end", [False, True])
def test_what_follows_the_end_need_not_converge(converge_at_end):
    """Position 3 ends the answer; behind it the model never makes up its mind."""
    slots = CanvasSlots(
        2, CANVAS, DenoisingDefaults(9, 0.4, 0.8, 0.1, 0.005, 1), torch.device("cpu")
    )
    for slot in range(2):
        # The second request ignores its end tokens.
        slots.add_request(slot, CanvasParams(), 0, end_tokens=[7, 9] if slot == 0 else [])
    slots.apply_staged_writes()
    slots.encoding.fill_(False)
    step = make_canvas_step(
        slots,
        entropy_bound_policy,
        uniform_noise(VOCAB),
        converge_at_end=converge_at_end,
        compile_backend=None,
    )
    argmax = torch.tensor([[1, 2, 3, 9, 4, 5, 6, 7]] * 2)
    entropy = torch.zeros(2, CANVAS)
    entropy[:, 4:] = 3.0
    none = torch.zeros(2, dtype=torch.int32)
    for i in range(2):
        argmax[:, 4:] = 10 + i
        output = step(
            SlotStatistics(argmax, argmax, entropy, entropy, entropy),
            none + CANVAS,
            none.bool(),
            torch.arange(2),
            none - 1,
            none,
            none,
        )
    assert (output.num_emitted > 0).tolist() == [converge_at_end, False]
