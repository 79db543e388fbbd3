"""The compiled step uses one graph for any number of requests, and equals eager execution."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_kernels.noise import Purpose, uniform_tokens
from tests.support.models.slots import (
    CPU,
    PLAIN,
    VOCAB,
    predicted,
    predicted_at_random,
    reveal_settings,
    slot_inputs,
    slots_of,
)
from tests.support.models.specs import diffusion_gemma_spec, masked_spec
from vllm_diffusion.canvas.slots import CanvasSlots, NewRequest, Phase
from vllm_diffusion.canvas.step import CanvasStep, SlotInputs
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.layouts import VerifiedDraft
from vllm_diffusion.decoding.levenshtein import Levenshtein
from vllm_diffusion.decoding.reveal import LinearSpec
from vllm_diffusion.decoding.rule import PositionStatistics
from vllm_diffusion.requests.arguments import RequestArguments
from vllm_diffusion.startup.machine import has_cpp_compiler

pytestmark = pytest.mark.engine

SLOTS, CANVAS = 5, 8


def run(
    backend: str | None, spec: CanvasSpec | None = None, device: torch.device = CPU
) -> tuple[list[torch.Tensor], list[int]]:
    """Run several canvases with 0 to all slots active; return canvases and emitted counts."""
    requests = [NewRequest(RequestArguments(), seed=slot) for slot in range(SLOTS)]
    slots = slots_of(spec or diffusion_gemma_spec(CANVAS, 4), *requests, device=device)
    step = CanvasStep(slots, compile_backend=backend)
    generator = torch.Generator().manual_seed(0)
    canvases, emitted = [], []
    for i in range(14):
        drawn = PositionStatistics(
            argmax=torch.randint(0, VOCAB, (SLOTS, CANVAS), generator=generator),
            candidate=torch.randint(0, VOCAB, (SLOTS, CANVAS), generator=generator),
            entropy=torch.rand(SLOTS, CANVAS, generator=generator),
            drawn_confidence=torch.rand(SLOTS, CANVAS, generator=generator),
        )
        statistics = PositionStatistics(*(x if x is None else x.to(device) for x in drawn))
        by_slot = SlotInputs(*(x.to(device) for x in slot_inputs(SLOTS, seed=torch.arange(SLOTS))))
        by_slot.num_rows[: i % (SLOTS + 1)] = CANVAS
        output = step(statistics, by_slot)
        canvases.append(slots.canvas.clone().cpu())
        emitted.append(int(output.num_emitted.sum()))
    return canvases, emitted


def test_compiled_once_and_equal_to_eager():
    """Another number of active requests recompiles nothing and gives the eager results."""
    eager_canvases, eager_emitted = run(None)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        canvases, emitted = run("eager")
    assert emitted == eager_emitted
    assert sum(emitted) > 0
    for compiled, eager in zip(canvases, eager_canvases, strict=True):
        assert torch.equal(compiled, eager)


def test_a_slot_has_its_first_canvas_before_any_pass():
    """A new slot has noise by its seed or masks, and the request's given and known tokens."""
    seeds, numbers = torch.tensor([7, -3]), torch.tensor([0, 2], dtype=torch.int32)
    noise = uniform_tokens(
        seeds, numbers, torch.zeros_like(numbers), CANVAS, VOCAB, Purpose.INITIAL
    )
    slots = CanvasSlots(SLOTS, diffusion_gemma_spec(CANVAS, 4), VOCAB, CPU)
    own = RequestArguments(seed_canvas=tuple(range(CANVAS)), pinned=(1,))
    slots.add_request(3, NewRequest(RequestArguments(), seed=7))
    slots.add_request(1, NewRequest(own, seed=-3, num_generated=2 * CANVAS))
    slots.add_request(0, NewRequest(own, seed=-3))
    slots.apply_staged_writes()
    assert torch.equal(slots.canvas[[3, 1]], noise)
    assert slots.canvas[0].tolist() == list(range(CANVAS))
    assert slots.phase.tolist() == [Phase.DENOISING] * SLOTS

    slots = slots_of(
        masked_spec(CANVAS),
        NewRequest(own, prompt_len=3, given=(11, 12, 13)),
        NewRequest(RequestArguments(), prompt_len=2, given=(14, 15)),
    )
    assert slots.canvas.tolist() == [[11, 12, 13, 3, 4, 5, 6, 7], [14, 15, 4, 4, 4, 4, 4, 4]]


def test_noise_of_some_tokens():
    """Noise is of the tokens that a model was trained to start from, and of each of them."""
    some = replace(diffusion_gemma_spec(CANVAS, 4), noise_tokens=range(5, 9))
    slots = slots_of(some, *(NewRequest(RequestArguments(), seed=seed) for seed in range(9)))
    assert set(slots.canvas.flatten().tolist()) == set(some.noise_tokens)


@pytest.mark.parametrize("commits", [False, True])
def test_a_canvas_begins_after_one_that_is_read(commits):
    """A pass that was launched before a read ended is a first step without inputs of the read."""
    reading = NewRequest(RequestArguments(max_steps=1, read_only=True))
    slots = slots_of(diffusion_gemma_spec(CANVAS, 4), reading)
    statistics = predicted([[1] * CANVAS], torch.ones(1, CANVAS))
    step = CanvasStep(slots, commits=lambda way: commits, compile_backend=None)
    output = step(statistics, slot_inputs(1, CANVAS))
    assert (output.num_emitted.tolist(), output.num_finished.tolist()) == ([CANVAS], [0])
    assert (slots.step.tolist(), slots.phase.tolist()) == ([0], [Phase.DENOISING])


@pytest.mark.parametrize("backend", [None, "eager"])
def test_a_draft_and_its_verification(backend):
    """A step drafts; the next pass emits what it verifies and starts the canvas after that."""
    spec = CanvasSpec.of(VerifiedDraft(CANVAS), LinearSpec(), 1, {}, mask_token_id=4)
    slots = slots_of(spec, PLAIN, PLAIN)
    torch._dynamo.reset()
    step = CanvasStep(slots, commits=lambda way: True, compile_backend=backend)

    def drawing(tokens: list[list[int]], width: int = CANVAS, **changes: torch.Tensor) -> Any:
        output = step(predicted(tokens), slot_inputs(2, width, **changes))
        return [output.num_emitted.tolist(), output.num_finished.tolist()]

    # The last row of a prompt draws the first token; one of them is the mask token.
    drawing([[4] * CANVAS, [11] * CANVAS], 0, last_known=torch.ones(2, dtype=torch.bool))
    assert drawing([[*range(20, 20 + CANVAS)]] * 2) == [[0, 0], [0, 0]]
    assert slots.canvas.tolist() == [[4, *range(21, 28)], [11, *range(21, 28)]]
    # Rows 0 and 1 of the first request agree, and all rows of the second.
    said = [[21, 22, 40, 24, 25, 26, 27, 41], [21, 22, 23, 24, 25, 26, 27, 42]]
    assert drawing(said) == [[3, CANVAS], [3, CANVAS]]
    assert slots.canvas.tolist() == [[40] + [4] * 7, [42] + [4] * 7]
    assert slots.phase.tolist() == [Phase.DENOISING] * 2


@pytest.mark.parametrize("converge_at_end", [False, True])
def test_what_follows_the_end_need_not_converge(converge_at_end):
    """A canvas converges although the model keeps changing tokens after the end at position 3."""
    # The second request ignores its end tokens.
    ending = NewRequest(RequestArguments(), end_tokens=[7, 9])
    slots = slots_of(diffusion_gemma_spec(CANVAS, 9), ending, PLAIN)
    step = CanvasStep(slots, converge_at_end=converge_at_end, compile_backend=None)
    argmax = torch.tensor([[1, 2, 3, 9, 4, 5, 6, 7]] * 2)
    entropy = torch.zeros(2, CANVAS)
    entropy[:, 4:] = 3.0
    for i in range(2):
        argmax[:, 4:] = 10 + i
        output = step(predicted(argmax, entropy), slot_inputs(2, CANVAS))
    assert (output.num_emitted > 0).tolist() == [converge_at_end, False]


def levenshtein_step(slots: CanvasSlots, backend: str | None, passes: int) -> list[torch.Tensor]:
    """Return canvases of that many passes over random statistics, first or later ones."""
    step = CanvasStep(slots, compile_backend=backend)
    generator = torch.Generator().manual_seed(1)
    canvases = []
    for _ in range(passes):
        by_slot = slot_inputs(slots.num_slots, slots.canvas_length)
        # The last slot has no rows.
        by_slot.num_rows[-1] = 0
        step(predicted_at_random(slots, generator), by_slot)
        canvases.append(slots.canvas.clone())
    return canvases


def levenshtein_slots() -> CanvasSlots:
    """Return three requests with blocks of their own, the second with given tokens."""
    rule = Levenshtein(4, delete_token_id=VOCAB - 2, split_token_id=VOCAB - 1)
    settings = reveal_settings(rule, max_post_steps=3)
    spec = masked_spec(CANVAS, rule=rule, settings=settings, max_denoising_steps=20)
    of_prompt = NewRequest(RequestArguments(), prompt_len=3, given=(11, 12, 13))
    return slots_of(spec, PLAIN, of_prompt, PLAIN)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_levenshtein_compiled_once_and_equal_to_eager(backend):
    """The Levenshtein rule with its memory compiles once and equals eager execution."""
    if backend == "inductor" and not has_cpp_compiler():
        pytest.skip("needs a C++ compiler")
    eager = levenshtein_step(levenshtein_slots(), None, 16)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = levenshtein_step(levenshtein_slots(), backend, 16)
    for ours, theirs in zip(compiled, eager, strict=True):
        assert torch.equal(ours, theirs)


def test_a_rule_forgets_its_canvas_with_a_new_owner():
    """A new owner clears a slot's memory, and a slot without rows keeps it."""
    slots = levenshtein_slots()
    for memory in slots.rule_memory.values():
        memory[2] = 1
    levenshtein_step(slots, None, 2)
    used = slots.rule_memory["fingerprints"]
    assert (used[:2, :2] != 0).all()
    assert all((memory[2] == 1).all() for memory in slots.rule_memory.values())
    for slot in range(3):
        slots.add_request(slot, PLAIN)
    slots.apply_staged_writes()
    assert not any(memory.any() for memory in slots.rule_memory.values())


def test_a_rule_forgets_its_canvas_with_the_next_one():
    """The block after a finished one begins with the memory of a first block."""
    slots = levenshtein_slots()
    while not slots.canvas_idx[0]:
        levenshtein_step(slots, None, 1)
    assert slots.step[0] == 0
    assert not any(memory[0].any() for memory in slots.rule_memory.values())
