"""Tests of the ways of a server: what is asked of a request's way, and chosen by slot."""

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from tests.support.models.slots import slot_inputs
from tests.support.models.specs import SETTINGS
from vllm_diffusion.canvas.slots import CanvasSlots
from vllm_diffusion.canvas.step import CanvasStep
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.entropy_bound import EntropyBound
from vllm_diffusion.decoding.layouts import FreeCanvas, VerifiedDraft
from vllm_diffusion.decoding.reveal import LinearSpec
from vllm_diffusion.decoding.rule import DecodingRule, Memory, StepDecision, StepInputs
from vllm_diffusion.decoding.ways import Way, WayOfSlots, holding

R, C = 6, 4
DRAFTS = LinearSpec()
CPU = torch.device("cpu")


class Counting(DecodingRule):
    """A rule with needs that no other rule of the server has: it emits the probability of a named
    token, counts its steps, draws positions and says when keys and values are final.
    """

    settings = {}
    memory: Mapping[str, Memory] = {"steps": Memory(torch.int32)}
    draws_positions = True
    can_finish_kv = True
    judges_to_end = True
    named_tokens = (7,)
    refused_fields: ClassVar[Mapping[str, str]] = {"bad_words": "is not counted."}

    def decide(
        self, inputs: StepInputs, settings: Mapping[str, Tensor], memory: Mapping[str, Tensor]
    ) -> StepDecision:
        assert inputs.uniform is not None
        assert inputs.end_tokens is not None
        assert inputs.predicted.named is not None
        assert inputs.predicted.named.shape[-1] == 1
        token = inputs.predicted.named[..., 0].round().long()
        done = memory["steps"] >= 1
        return StepDecision(
            keep=inputs.valid,
            tokens=token,
            result=token,
            done=done,
            memory={"steps": memory["steps"] + 1},
            has_final_kv=done,
        )


WAYS = (
    Way("denoise", FreeCanvas(C), EntropyBound(), 8),
    Way("draft", VerifiedDraft(C), DRAFTS, 1),
    Way("causal", VerifiedDraft(C), DRAFTS, 1, denoises=False),
    Way("count", FreeCanvas(C), Counting(), 3),
)


def test_facts_and_choices() -> None:
    """Each slot gets what its own way says, and ways that agree are asked once; with one way, or
    where all agree, nothing is chosen.
    """
    way = WayOfSlots(WAYS, R, CPU)
    assert way.index is not None
    way.index.copy_(torch.tensor([0, 1, 2, 3, 1, 0]))
    of_slots = [WAYS[i] for i in way.index.tolist()]
    for of in (
        lambda one: one.layout.verifies,
        lambda one: one.denoises,
        lambda one: one.rule.can_finish_kv,
        lambda one: one.name in ("denoise", "count"),
    ):
        assert way.fact(of).tolist() == [of(one) for one in of_slots]
        slot = torch.tensor([3, 3, 1])
        assert way.fact(of, slot).tolist() == [of(of_slots[i]) for i in (3, 3, 1)]
    assert way.fact(lambda one: one.layout.length == C) is True
    asked: list[int] = []

    def value(steps: int) -> tuple[Tensor, dict[str, Tensor]]:
        asked.append(steps)
        return torch.full((R, 2), steps), {"steps": torch.full((R,), steps)}

    chosen, named = way.choose(lambda one: one.max_denoising_steps, value)
    assert asked == [8, 1, 3]
    wanted = [one.max_denoising_steps for one in of_slots]
    assert chosen[:, 0].tolist() == chosen[:, 1].tolist() == named["steps"].tolist() == wanted
    alone = WayOfSlots(WAYS[:1], R, CPU)
    assert alone.index is None
    values = torch.ones(R, dtype=torch.bool)
    assert alone.choose(lambda one: one.name, lambda name: values) is values
    assert holding(alone.fact(lambda one: one.denoises), values) is values


def test_names_of_ways() -> None:
    """A server has the settings and needs of all its rules, and a way refuses its own fields."""
    spec = CanvasSpec(WAYS, SETTINGS)
    assert spec.way_names is not None
    assert spec.way_names.words == ("denoise", "draft", "causal", "count")
    assert CanvasSpec(WAYS[:1], SETTINGS).way_names is None
    assert spec.named_tokens == (7,)
    assert len(spec.rules) == 3
    assert [way.length for way in WAYS] == [C, C, 1, C]
    assert ["bad_words" in way.refused_fields for way in WAYS] == [False, True, True, True]


@pytest.mark.parametrize("backend", [None, pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_rule_whose_needs_no_other_has(backend: str | None) -> None:
    """A slot is decided as on a server with its way alone, whatever the other ways need."""
    steps = {}
    for name, ways in {"all": WAYS, "count": WAYS[3:], "denoise": WAYS[:1]}.items():
        slots = CanvasSlots(R, CanvasSpec(ways, SETTINGS), 32, CPU)
        if slots.way.index is not None:
            slots.way.index.copy_(torch.tensor([0, 3, 0, 3, 0, 3]))
        for setting, tensor in slots.requested.settings.items():
            tensor.fill_(SETTINGS[setting])
        slots.requested.max_steps.fill_(3)
        slots.requested.end_tokens.fill_(-1)
        step = CanvasStep(slots, commits=lambda way: way.name == "count", compile_backend=backend)
        statistics = slots.spec.statistics(R, CPU)
        statistics.candidate.copy_(torch.arange(R * C).view(R, C))
        statistics.argmax.copy_(statistics.candidate)
        if statistics.named is not None:
            statistics.named.copy_(torch.arange(R * C).view(R, C, 1) + 5)
        rows = slot_inputs(R, C, seed=torch.arange(R))
        outputs = [step(statistics, rows) for _ in range(2)]
        steps[name] = [(output.tokens, output.num_emitted, output.done) for output in outputs]
    for own, those in {"denoise": slice(0, R, 2), "count": slice(1, R, 2)}.items():
        for together, alone in zip(steps["all"], steps[own], strict=True):
            for mixed, single in zip(together, alone, strict=True):
                assert mixed[those].tolist() == single[those].tolist()
    assert steps["count"][1][1].tolist() == [C] * R
