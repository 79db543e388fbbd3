"""Tests of where a canvas continues in the text that its answer is expected to resemble."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams

from tests.support.models.specs import diffusion_gemma_spec
from vllm_diffusion.canvas.predictions import (
    LEAST_RUN,
    LONGEST_RUN,
    MOST_MISSES,
    FollowedText,
    Predictions,
    expected,
)
from vllm_diffusion.canvas.slots import CanvasSlots, NewRequest
from vllm_diffusion.requests.arguments import RequestArguments

pytestmark = pytest.mark.engine

CANVAS, VOCAB = 8, 50
CPU = torch.device("cpu")


def run_before(text: list[int], place: int, emitted: list[int]) -> int:
    """Count the tokens before a place of the text that equal the end of the emitted tokens."""
    length = 0
    while length < min(LONGEST_RUN, place, len(emitted)):
        if text[place - 1 - length] != emitted[-1 - length]:
            break
        length += 1
    return length


def searched(text: list[int], emitted: list[int], goes_on: int) -> int | None:
    """Return the place after the longest such run, the nearest of equal ones, or ``None``."""
    best = max(
        range(len(text) + 1), key=lambda at: (run_before(text, at, emitted), -abs(at - goes_on))
    )
    return best if run_before(text, best, emitted) >= LEAST_RUN else None


@pytest.mark.parametrize("num_tokens", [2, 3, 20])
def test_a_canvas_goes_on_after_the_longest_run(num_tokens: int) -> None:
    """The search by tensors finds what a loop over the text finds, for any amount of matches."""
    rng = random.Random(num_tokens)
    num_found = 0
    for _ in range(60):
        text = [rng.randrange(num_tokens) for _ in range(rng.randint(1, 60))]
        followed = FollowedText(text, is_prompt=rng.random() < 0.5)
        emitted: list[int] = []
        goes_on = 0
        for _ in range(4):
            size = rng.randint(1, CANVAS)
            begin = rng.randrange(len(text))
            canvas = text[begin : begin + size] if rng.random() < 0.7 else [99] * size
            followed.advance(canvas)
            emitted += canvas
            goes_on += len(canvas)
            place = searched(text, emitted, goes_on)
            if place is not None:
                num_found += 1
                goes_on = place
            is_dropped = int(followed.progress.misses) >= MOST_MISSES
            rest = text[goes_on : goes_on + CANVAS]
            wanted = rest + [-1] * (CANVAS - len(rest))
            if place is None or is_dropped:
                wanted = [-1] * CANVAS
            assert expected(followed.progress, followed.texts, CANVAS)[0].tolist() == wanted
    assert num_found > 20


def test_two_misses() -> None:
    """A text is dropped after two canvases that each kept less than half of it."""
    text = list(range(60))
    for num_kept, is_dropped in ((3, True), (4, False)):
        followed = FollowedText(text, is_prompt=False)
        for number in range(3):
            begin = number * CANVAS
            # The end matches, so that the search goes on there.
            wrong = [99] * (CANVAS - num_kept)
            followed.advance(wrong + text[begin + CANVAS - num_kept : begin + CANVAS])
        start = expected(followed.progress, followed.texts, CANVAS)[0].tolist()
        assert (start == [-1] * CANVAS) == is_dropped
        num_started = CANVAS * (2 if is_dropped else 3)
        assert followed.accepted + followed.rejected == num_started
        assert followed.accepted == num_started * num_kept // CANVAS


def test_slots() -> None:
    """Each slot follows its own text, whatever other rows and owners come in between."""
    slots = CanvasSlots(4, diffusion_gemma_spec(CANVAS, 4), VOCAB, CPU)
    prompt = list(range(5))
    text = tuple(random.Random(0).randrange(5, VOCAB) for _ in range(40))

    def add(slot: int, *, generated: int = 0, brings: bool = True) -> None:
        arguments = RequestArguments(prediction=text) if brings else RequestArguments()
        own = {"vllm_diffusion": arguments}
        params = SamplingParams(seed=slot, max_tokens=64, extra_args=own)
        known = [*prompt, *text[:generated]]
        new = SimpleNamespace(sampling_params=params, prompt_len=5, prefill_token_ids=known)
        slots.add_request(slot, NewRequest.of(new, slots.spec))

    def emit(emitting: dict[int, tuple[int, ...]]) -> None:
        tokens = torch.full((4, CANVAS), 3)
        num_emitted = torch.zeros(4, dtype=torch.int32)
        for slot, emitted in emitting.items():
            tokens[slot] = torch.tensor(emitted)
            num_emitted[slot] = CANVAS
        slots.predictions.apply(slots.canvas, tokens, num_emitted)

    add(1, brings=False)
    slots.apply_staged_writes()
    alone = slots.canvas.clone()
    emit({1: text[:CANVAS]})
    assert torch.equal(slots.canvas, alone), "nobody has brought a text"
    assert slots.predictions._texts is None

    add(0)
    add(2, generated=2 * CANVAS)
    slots.apply_staged_writes()
    assert slots.canvas[0].tolist() == list(text[:CANVAS])
    assert slots.canvas[2].tolist() == list(text[2 * CANVAS : 3 * CANVAS])
    emit({0: text[:CANVAS], 1: text[:CANVAS]})
    assert slots.canvas[0].tolist() == list(text[CANVAS : 2 * CANVAS])
    assert torch.equal(slots.canvas[1], alone[1])
    assert slots.canvas[2].tolist() == list(text[2 * CANVAS : 3 * CANVAS])
    # Slot 2 leaves; its next owner brings nothing, and neither does that of slot 0.
    for slot in (0, 2):
        slots.remove_request(slot)
        add(slot, brings=False)
    slots.apply_staged_writes()
    before = slots.canvas.clone()
    emit({0: text[:CANVAS], 2: text[:CANVAS]})
    assert torch.equal(slots.canvas, before)
    # The end of the text: what follows is noise, here what stood there.
    add(3, generated=4 * CANVAS)
    slots.apply_staged_writes()
    assert slots.canvas[3].tolist() == list(text[4 * CANVAS :])
    stood = slots.canvas[3].clone()
    emit({3: text[4 * CANVAS :]})
    assert torch.equal(slots.canvas[3], stood)


def test_no_text_is_no_token() -> None:
    """Before anything is emitted no place in the text matches, whatever token pads it."""
    predictions = Predictions(2, CPU)
    canvas = torch.zeros(2, CANVAS, dtype=torch.long)
    predictions.write({0: FollowedText([7, 8], is_prompt=True)})
    predictions.apply(canvas, torch.full((2, CANVAS), 7), torch.tensor([1, 0]))
    assert not canvas.any()
