"""Verified drafts keep the model's distribution.

Every outcome of every draw is enumerated, through the code of the compiled step.
"""

from collections import defaultdict
from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import pytest
import torch

from tests.support.models.slots import predicted, slot_inputs, slots_of
from tests.support.models.specs import diffusion_gemma_spec
from vllm_diffusion.canvas.slots import NewRequest
from vllm_diffusion.canvas.step import CanvasStep
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.entropy_bound import DenoisedDraft
from vllm_diffusion.decoding.layouts import CausalDraft, VerifiedDraft
from vllm_diffusion.decoding.reveal import LinearSpec
from vllm_diffusion.requests.arguments import RequestArguments

pytestmark = pytest.mark.engine

VOCAB, CANVAS, LENGTH = 3, 3, 4
DRAWS = torch.tensor(list(product(range(VOCAB), repeat=CANVAS)))
SPECS = {
    # The mask token is one that can be drawn.
    "one step from masks": CanvasSpec.of(
        VerifiedDraft(CANVAS), LinearSpec(), 1, {}, mask_token_id=2
    ),
    "one causal step from some noise": CanvasSpec.of(
        CausalDraft(CANVAS), LinearSpec(), 1, {}, noise_tokens=range(1, VOCAB)
    ),
    "two steps from noise": diffusion_gemma_spec(
        CANVAS, 2, layout=VerifiedDraft(CANVAS), rule=DenoisedDraft()
    ),
}


def outcomes(law: Callable[[list[int]], torch.Tensor]) -> dict[tuple[int, ...], float]:
    """Return every sequence of that many tokens with its probability by the law."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        found = {
            (*said, token): p * float(share)
            for said, p in found.items()
            for token, share in enumerate(law(list(said)))
        }
    return found


class Toy:
    """A law of the next token and a draft, both of which depend on the tokens before."""

    def __init__(self, seed: int, quality: float) -> None:
        """Draw the law and the draft.

        Args:
            seed: Seed of both.
            quality: Share of the drafted tokens that are the law's likeliest.
        """
        self._generator = torch.Generator().manual_seed(seed)
        self._quality = quality
        self._laws: dict[tuple[int, ...], torch.Tensor] = {}
        self._guesses: dict[tuple[int, ...], int] = {}

    def law(self, said: list[int]) -> torch.Tensor:
        key = tuple(said)
        if key not in self._laws:
            self._laws[key] = torch.rand(VOCAB, generator=self._generator).double().softmax(-1)
        return self._laws[key]

    def draft(self, said: list[int]) -> list[int]:
        """Return a canvas whose first token is already emitted."""
        canvas = said[-1:]
        while len(canvas) < CANVAS:
            before = [*said[:-1], *canvas]
            canvas.append(self._guess(before))
        return canvas

    def _guess(self, said: list[int]) -> int:
        key = tuple(said)
        if key not in self._guesses:
            is_good = torch.rand((), generator=self._generator) < self._quality
            guess = torch.randint(VOCAB, (), generator=self._generator)
            self._guesses[key] = int(self.law(said).argmax() if is_good else guess)
        return self._guesses[key]


def verified(spec: CanvasSpec, said: list[int], draft: list[int]) -> list[list[int]]:
    """Return the tokens after a draft and its verification, for each of ``DRAWS``.

    The last token of each begins a canvas.

    Args:
        spec: The canvases of the draft.
        said: Tokens up to the canvas's first one.
        draft: The canvas that the rows of every step predict.
    """
    requests = [NewRequest(RequestArguments(), seed=slot) for slot in range(len(DRAWS))]
    slots = slots_of(spec, *requests, vocab_size=VOCAB)
    step = CanvasStep(slots, commits=lambda way: True, compile_backend=None)

    def run(drawn: Any, width: int = CANVAS, **changes: torch.Tensor) -> list[int]:
        return step(
            predicted(drawn), slot_inputs(len(DRAWS), width, **changes)
        ).num_emitted.tolist()

    everyone = torch.ones(len(DRAWS), dtype=torch.bool)
    run(torch.full(DRAWS.shape, said[-1]), 0, last_known=everyone)
    for _ in range(spec.max_denoising_steps):
        # The token at the first position is not drafted.
        assert not any(run([[VOCAB - 1, *draft[1:]]] * len(DRAWS)))
    assert slots.canvas.tolist() == [draft] * len(DRAWS)
    emitted = run(DRAWS)
    return [
        [*said[:-1], *draft[:num], first]
        for num, first in zip(emitted, slots.canvas[:, 0].tolist(), strict=True)
    ]


@pytest.mark.parametrize("quality", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", SPECS)
def test_law(name: str, quality: float) -> None:
    """A sequence is as likely with verified drafts as when each token is drawn by the law."""
    toy = Toy(seed=1, quality=quality)
    found: dict[tuple[int, ...], float] = defaultdict(float)
    open_ends = {(token,): float(p) for token, p in enumerate(toy.law([]))}
    while open_ends:
        said, probability = open_ends.popitem()
        if len(said) >= LENGTH:
            found[said[:LENGTH]] += probability
            continue
        draft = toy.draft(list(said))
        laws = [toy.law([*said[:-1], *draft[: i + 1]]) for i in range(CANVAS)]
        for drawn, after in zip(
            DRAWS.tolist(), verified(SPECS[name], list(said), draft), strict=True
        ):
            share = prod(float(law[token]) for law, token in zip(laws, drawn, strict=True))
            key = tuple(after)
            open_ends[key] = open_ends.get(key, 0.0) + probability * share
    assert found == pytest.approx(outcomes(toy.law), rel=1e-9)
