"""Pinned positions keep their tokens in the answer, whatever the model predicts there."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

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
from vllm_diffusion.canvas.slots import CanvasSlots, NewRequest
from vllm_diffusion.canvas.step import CanvasStep, StepOutput
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.layouts import (
    AlignedBlock,
    BlockAfterPrompt,
    CanvasLayout,
    FirstTokenBlock,
    ShiftedBlock,
)
from vllm_diffusion.decoding.levenshtein import Levenshtein
from vllm_diffusion.decoding.reveal import Reveal, RevealAndEdit
from vllm_diffusion.decoding.rule import DecodingRule
from vllm_diffusion.requests.arguments import RequestArguments

pytestmark = pytest.mark.engine

CANVAS, MASK, END = 8, 4, 9


def revealing(rule: DecodingRule, layout: CanvasLayout) -> CanvasSpec:
    """Return masked blocks that take a few steps."""
    settings = reveal_settings(rule)
    return CanvasSpec.of(layout, rule, 12, settings, mask_token_id=MASK)


LEVENSHTEIN = Levenshtein(MASK, delete_token_id=VOCAB - 2, split_token_id=VOCAB - 1)
SPECS = {
    "entropy bound": diffusion_gemma_spec(CANVAS, 5),
    "reveal, aligned": masked_spec(CANVAS),
    "reveal, after the prompt": revealing(Reveal(MASK), BlockAfterPrompt(CANVAS)),
    "reveal, first token drawn": revealing(Reveal(MASK), FirstTokenBlock(CANVAS)),
    "reveal, shifted": revealing(Reveal(MASK), ShiftedBlock(CANVAS)),
    "edit": revealing(RevealAndEdit(MASK), AlignedBlock(CANVAS)),
    "levenshtein": revealing(LEVENSHTEIN, AlignedBlock(CANVAS)),
}


def outputs(
    slots: CanvasSlots, seed: int, most: int = 40, **options: Any
) -> Iterator[tuple[StepOutput, torch.Tensor]]:
    """Outputs of passes over all slots, each with the canvases that it began from.

    The first pass has the last row of each prompt alone where that draws a canvas's first token.
    """
    step = CanvasStep(slots, **{"compile_backend": None} | options)
    generator = torch.Generator().manual_seed(seed)
    R, C = slots.canvas.shape
    if slots.spec.layout.draws_first_token:
        last_known = slots.num_given == 0
        step(predicted_at_random(slots, generator), slot_inputs(R, last_known=last_known))
    for _ in range(most):
        before = slots.canvas.clone()
        yield step(predicted_at_random(slots, generator), slot_inputs(R, C)), before


@pytest.mark.parametrize("kind", ["emitted by its step", "committed", "read only"])
@pytest.mark.parametrize("name", SPECS)
def test_pins_hold_in_every_input_and_in_the_answer(name: str, kind: str) -> None:
    """Every step begins with the pinned tokens, and the first canvas is emitted with them."""
    spec, num_slots = SPECS[name], 24
    generator = torch.Generator().manual_seed(7)
    slots = CanvasSlots(num_slots, spec, VOCAB, CPU)
    seed_canvas = torch.randint(0, VOCAB, (num_slots, CANVAS), generator=generator)
    is_pinned = torch.rand(num_slots, CANVAS, generator=generator) < 0.5
    for slot in range(num_slots):
        num_given = spec.num_given(slot % 4)
        given = tuple(range(10, 10 + num_given))
        is_pinned[slot, num_given:] |= torch.arange(num_given, CANVAS) == CANVAS - 1
        arguments = RequestArguments(
            seed_canvas=tuple(seed_canvas[slot].tolist()),
            pinned=tuple(is_pinned[slot].nonzero()[:, 0].tolist()),
            read_only=kind == "read only",
        )
        slots.add_request(slot, NewRequest(arguments, prompt_len=slot % 4, given=given))
        # Prompt's positions are the prompt's.
        is_pinned[slot, :num_given] = False
    slots.apply_staged_writes()
    answers: dict[int, torch.Tensor] = {}
    commits = (
        kind == "committed" or spec.ways[0].rule.can_finish_kv or spec.layout.draws_first_token
    )
    for output, began_from in outputs(slots, seed=3, commits=lambda way: commits):
        for slot in range(num_slots):
            if slot in answers:
                continue
            pins = is_pinned[slot]
            assert torch.equal(began_from[slot, pins], seed_canvas[slot, pins])
            assert (output.decided_step[slot, pins] == 0).all()
            if output.denoised[slot]:
                assert output.kept[slot, pins].all()
            if output.num_emitted[slot] > 0:
                answers[slot] = output.tokens[slot]
    assert len(answers) == num_slots
    for slot, tokens in answers.items():
        num_given = spec.num_given(slot % 4)
        assert torch.equal(
            tokens[: CANVAS - num_given][is_pinned[slot, num_given:]],
            seed_canvas[slot, is_pinned[slot]],
        )
    assert not slots.pinned.any()


@pytest.mark.parametrize(
    ("spec", "first"),
    [
        (diffusion_gemma_spec(CANVAS, 1), [30, 30] + [7] * 6),
        # What a masked model's canvas begins with stays.
        (masked_spec(CANVAS, max_denoising_steps=1), [30] * CANVAS),
    ],
    ids=["noise", "masks"],
)
def test_pins_do_not_come_again_in_a_later_canvas(spec: CanvasSpec, first: list[int]) -> None:
    """Pins belong to the first canvas, also after a preemption: the second begins as noise or plain
    masks and is emitted as predicted.
    """
    arguments = RequestArguments(seed_canvas=(30,) * CANVAS, pinned=(0, 1))
    slots = slots_of(
        spec,
        NewRequest(arguments, prompt_len=CANVAS),
        NewRequest(arguments, prompt_len=CANVAS, num_generated=CANVAS),
    )
    is_masked = spec.mask_token_id is not None
    assert slots.pinned.sum(dim=-1).tolist() == [2, 0]
    assert slots.canvas[0].tolist() == [30] * CANVAS
    assert (slots.canvas[1] == MASK).all() or not is_masked
    step = CanvasStep(slots, compile_backend=None)
    statistics, rows = predicted([[7] * CANVAS] * 2), slot_inputs(2, CANVAS)
    assert step(statistics, rows).tokens.tolist() == [first, [7] * CANVAS]
    assert (slots.canvas == MASK).all() or not is_masked
    assert step(statistics, rows).tokens.tolist() == [[7] * CANVAS] * 2


def test_convergence_does_not_wait_for_agreement() -> None:
    """Uncertain and changing predictions at pinned positions do not delay convergence.

    The second request has the same predictions and no pins: it takes all of its steps.
    """
    pinned = RequestArguments(seed_canvas=(30,) * CANVAS, pinned=(2, 3))
    slots = slots_of(diffusion_gemma_spec(CANVAS, 9), NewRequest(pinned), PLAIN)
    step = CanvasStep(slots, compile_backend=None)
    entropy = torch.zeros(2, CANVAS)
    entropy[:, 2:4] = 3.0
    emitted = []
    for i in range(9):
        argmax = torch.full((2, CANVAS), 7)
        argmax[:, 2:4] = 10 + i
        output = step(predicted(argmax, entropy), slot_inputs(2, CANVAS))
        emitted.append((output.num_emitted > 0).tolist())
        if i == 1:
            assert output.tokens[0].tolist() == [7, 7, 30, 30, 7, 7, 7, 7]
    assert [i for i, (first, _) in enumerate(emitted) if first][0] == 1
    assert [i for i, (_, second) in enumerate(emitted) if second] == [8]


@pytest.mark.parametrize("name", ["entropy bound", "reveal, aligned"])
def test_a_pinned_end_token_ends_what_is_judged(name: str) -> None:
    """With ``converge_at_end`` a canvas does not wait for positions after a pinned end token."""
    canvas = (30, 30, END) + (MASK,) * (CANVAS - 3)
    arguments = [RequestArguments(seed_canvas=canvas, pinned=pins) for pins in ((0, 1, 2), (0, 1))]
    slots = slots_of(SPECS[name], *(NewRequest(each, end_tokens=[END]) for each in arguments))
    if slots.spec.mask_token_id is not None:
        # A token that a masked model's canvas begins with stays, pinned or not.
        slots.canvas[1, 2] = MASK
    step = CanvasStep(slots, converge_at_end=True, compile_backend=None)
    entropy = torch.full((2, CANVAS), 3.0)
    for i in range(2):
        statistics = predicted([[10 + i] * CANVAS] * 2)._replace(entropy=entropy)
        output = step(statistics, slot_inputs(2, CANVAS))
        if output.done.any():
            break
    assert output.done.tolist() == [True, False]
    assert output.tokens[0, :3].tolist() == [30, 30, END]
