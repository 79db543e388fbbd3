"""What is tuned is right, faster by a twentieth, and the default where there is doubt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attention_kernels.canvas_attention import AttentionOptions, canvas_attention
from attention_kernels.checks import AttentionShape
from tests.support.specs import diffusion_gemma_spec, masked_spec
from vllm_diffusion.kernel_choice import timing
from vllm_diffusion.kernel_choice.cases import KernelCase, Served
from vllm_diffusion.kernel_choice.process import Outcome
from vllm_diffusion.kernel_choice.step_shape import StepShape
from vllm_diffusion.kernel_choice.timing import Timer, attention_call, settle
from vllm_diffusion.kernel_choice.tuning import (
    GAIN,
    ROUNDS,
    Answer,
    Question,
    answer,
    attention_questions,
    choose,
    sampler_question,
    with_right_ways,
)
from vllm_diffusion.startup.kernel_choices import DEFAULT_KERNELS, LayerKind

SLIDING, FULL = LayerKind(4, 2, 256, 63, "auto"), LayerKind(4, 1, 512, -1, "auto")
CPU = torch.device("cpu")


@st.composite
def measured(draw: st.DrawFn) -> list[list[float]]:
    """Times of some ways on some shapes."""
    shapes = draw(st.integers(1, 4))
    row = st.lists(st.floats(0.0, 1e6), min_size=shapes, max_size=shapes)
    return draw(st.lists(row, min_size=1, max_size=6))


@given(measured())
def test_choose(times: list[list[float]]) -> None:
    """Nothing is chosen that does not pay; of what does, the fastest."""
    base = times[0]

    def pays(row: list[float]) -> bool:
        loses = any(a > (1 + GAIN) * b for a, b in zip(row, base, strict=True))
        return not loses and sum(row) < sum(base) and sum(row) <= (1 - GAIN) * sum(base)

    chosen, paying = choose(times), [i for i, row in enumerate(times) if pays(row)]
    if not paying:
        assert chosen == 0
    else:
        assert chosen in paying
        assert sum(times[chosen]) == min(sum(times[i]) for i in paying)


@given(measured())
def test_ties_keep_the_default(times: list[list[float]]) -> None:
    """Ways that take as long as the default leave it in place, also where no time was measured."""
    assert choose([times[0]] * len(times)) == 0


@pytest.mark.parametrize(
    ("faster", "chosen"),
    [([95.0, 95.0], 1), ([96.0, 95.0], 0), ([60.0, 106.0], 0), ([60.0, 105.0], 1)],
    ids=["5 %", "4.5 %", "one shape 6 % slower", "one shape 5 % slower"],
)
def test_choose_at_the_limits(faster: list[float], chosen: int) -> None:
    """A twentieth is enough, and no shape may lose more than one."""
    assert choose([[100.0, 100.0], faster]) == chosen


def served(spec: Any = None, *kinds: LayerKind, spans: tuple[int, ...] = (0,)) -> Served:
    """What a small model serves."""
    spec = spec or diffusion_gemma_spec(8)
    is_gemma = spec.mask_token_id is None
    step = StepShape(spec, 64, 16, 2, dtype="float32", is_self_conditioned=is_gemma)
    return Served(kinds or (SLIDING, FULL), step, 4096, spans=spans)


def right(case: KernelCase) -> Outcome:
    """A check that finds everything right."""
    return Outcome("right")


def clock_of(microseconds: Callable[[KernelCase], float | None]) -> tuple[Any, list[KernelCase]]:
    """A clock that stands in for a GPU, and what it was asked."""
    asked: list[KernelCase] = []

    def clock(case: KernelCase) -> Outcome:
        asked.append(case)
        time = microseconds(case)
        return (
            Outcome("unknown", "out of memory")
            if time is None
            else Outcome("right", microseconds=time)
        )

    return clock, asked


def test_questions() -> None:
    """Each kind of layer is asked about in each phase, on every length and number of requests."""
    questions = list(attention_questions(served(), (100, 3000), (1, 3)))
    assert [question.subject for question in questions] == [
        f"attention of {kind.name}, {phase}"
        for kind in (SLIDING, FULL)
        for phase in ("denoise", "mixed")
    ]
    for question in questions:
        names = [way.name for way in question.candidates]
        assert names == [f"{i}, splits up to {n}" for i in ("triton", "cute") for n in (8, 4, 2, 1)]
        # What serves untuned is the first.
        first = question.candidates[0].adopt(DEFAULT_KERNELS)
        assert {n for phases in first.most_splits.values() for n in phases.values()} == {8}
        for way in question.candidates:
            shapes = [case.shapes[0] for case in way.timed]
            assert {(s.context, len(s.rows)) for s in shapes} == {  # type: ignore[union-attr]
                (context, n) for context in (100, 3000) for n in (1, 3)
            }
            # What is checked is what serves, cut as it serves.
            cuts = {s.most_splits for case in (*way.checks, *way.timed) for s in case.shapes}  # type: ignore[union-attr]
            assert cuts == {int(way.name.split()[-1])}
    rows = [case.shapes[0].rows for case in questions[1].candidates[0].timed][:2]  # type: ignore[union-attr]
    assert rows == [((16, 8),), ((32, 32),)]


def test_passes_with_images_are_triton_s() -> None:
    """FlashAttention-4 is checked and timed on passes without spans, and is no way where all have some."""
    for question in attention_questions(served(spans=(0, 8)), (100,), (1,)):
        for way in question.candidates:
            spans = {s.span for case in way.checks for s in case.shapes}  # type: ignore[union-attr]
            assert spans == ({0} if way.name.startswith("cute") else {0, 8})
            assert {case.shapes[0].span for case in way.timed} == {0}  # type: ignore[union-attr]
    for question in attention_questions(served(spans=(8,)), (100,), (1,)):
        assert {way.name.split(",")[0] for way in question.candidates} == {"triton"}


def test_sampler_question() -> None:
    """Soft embeddings are a model's own; streams are everybody's."""
    ways = sampler_question(served(), 500, (1, 3)).candidates
    assert [way.name for way in ways] == [
        f"skip_unlikely {skips}, {streams}"
        for skips in ("false", "true")
        for streams in ("one stream", "two streams")
    ]
    adopted = ways[3].adopt(DEFAULT_KERNELS)
    assert (adopted.skip_unlikely, adopted.two_streams) == (True, True)
    for way in ways:
        # Checked on small inputs, and timed on the served vocabulary.
        assert {case.kernel for case in way.checks} >= {"statistics", "step graph"}
        assert [(s.vocab, s.slots) for case in way.timed for s in case.shapes] == [
            (500, 1),
            (500, 3),
        ]  # type: ignore[union-attr]
        kernels = [s.kernels for case in way.timed for s in case.shapes]  # type: ignore[union-attr]
        assert kernels == [way.adopt(DEFAULT_KERNELS)] * 2
    assert len(sampler_question(served(masked_spec(8)), 500, (1,)).candidates) == 2


def first_question() -> Question:
    return next(iter(attention_questions(served(), (100, 3000), (1,))))


def test_answer() -> None:
    """Ways are timed in turns; the fastest one's choices are added, and the line says what is gained."""

    def microseconds(case: KernelCase) -> float:
        (shape,) = case.shapes
        assert isinstance(shape, AttentionShape)
        return shape.context * (0.8 if case.impl == "cute" and shape.most_splits == 2 else 1.0)

    clock, asked = clock_of(microseconds)
    question = first_question()
    found, kernels = answer(question, clock, DEFAULT_KERNELS)
    assert found.line() == (
        f"{question.subject}: cute, splits up to 2, 20% less time than triton, splits up to 8"
    )
    assert kernels.attention == {SLIDING.name: {"denoise": "cute"}}
    assert kernels.most_splits == {SLIDING.name: {"denoise": 2}}
    assert kernels.attention_of(SLIDING, "mixed") == "auto"
    # Each round asks every way once, so that a GPU that gets slower slows all of them.
    ways = len(question.candidates)
    assert len(asked) == 2 * ROUNDS * ways
    for i in range(0, len(asked), ways):
        assert len({case.key for case in asked[i : i + ways]}) == ways


def test_noise_does_not_decide() -> None:
    """A round in which the default was slow is one of several."""
    rounds: dict[str, int] = {}

    def microseconds(case: KernelCase) -> float:
        rounds[case.key] = rounds.get(case.key, 0) + 1
        return 1000.0 if "triton" in case.name and rounds[case.key] <= ROUNDS // 2 else 100.0

    found, kernels = answer(first_question(), clock_of(microseconds)[0], DEFAULT_KERNELS)
    assert found.chosen == "triton, splits up to 8"
    assert "nothing right is 5% faster" in found.line()
    assert kernels.attention_of(SLIDING, "denoise") == "triton"


def test_wrong_ways_are_not_timed() -> None:
    """What the check does not find right never serves, however fast; unknown is not right."""
    question = first_question()

    def check(case: KernelCase) -> Outcome:
        return (
            right(case) if case.impl == "triton" else Outcome("wrong", "error 1e+00 exceeds 1e-03")
        )

    some = with_right_ways(question, check)
    assert [way.name for way in some.candidates] == [
        way.name for way in question.candidates if way.name.startswith("triton")
    ]
    clock, asked = clock_of(lambda case: 1.0 if case.impl == "cute" else 100.0)
    found, kernels = answer(some, clock, DEFAULT_KERNELS)
    assert {case.impl for case in asked} == {"triton"}
    assert kernels.attention_of(SLIDING, "denoise") == "triton"
    nothing = with_right_ways(question, lambda case: Outcome("unknown", "no time was left"))
    found, kernels = answer(nothing, clock, DEFAULT_KERNELS)
    assert (found.chosen, kernels) == (None, DEFAULT_KERNELS)
    assert found.line().endswith(": nothing is chosen, since nothing was found right")


def test_shapes_without_memory() -> None:
    """A shape that the default cannot run is left out; a way that lacks a shape that it can is too."""

    def microseconds(case: KernelCase) -> float | None:
        (shape,) = case.shapes
        assert isinstance(shape, AttentionShape)
        if shape.context == 3000:
            return None
        return 100.0 if case.impl == "triton" else 50.0

    found, _ = answer(first_question(), clock_of(microseconds)[0], DEFAULT_KERNELS)
    assert found.chosen == "cute, splits up to 8"
    assert found.microseconds["triton, splits up to 8"] == 100.0

    def fails(case: KernelCase) -> float | None:
        return 100.0 if case.impl == "triton" else None

    found, _ = answer(first_question(), clock_of(fails)[0], DEFAULT_KERNELS)
    assert found.chosen == "triton, splits up to 8"
    found, kernels = answer(first_question(), clock_of(lambda case: None)[0], DEFAULT_KERNELS)
    assert (found, kernels.attention) == (Answer(first_question().subject, None), {})


def test_timer_keeps_the_graphs_of_a_subject() -> None:
    """Each way of a subject is captured once, whatever the rounds; another subject takes their memory."""
    captured = []

    def capture(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
        captured.append(call)
        return call

    timer = Timer(capture)
    shape = AttentionShape(2, 1, 16, 7, ((8, 0),), 20, dtype="float32")
    cases = [
        KernelCase("attention", subject, "reference", (replace(shape, most_splits=most),))
        for subject in ("a", "b")
        for most in (8, 1)
    ]
    for _ in range(2):
        for case in cases[:2]:
            timer(case, CPU).call()
    assert len(captured) == 2
    timer(cases[2], CPU)
    timer(cases[0], CPU)
    assert len(captured) == 4


def test_timed_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed is attention of the whole pass, and the steps of all canvases from noise to certainty."""
    shape = AttentionShape(2, 1, 16, 7, ((16, 8), (8, 0)), 20, dtype="float32")
    batch = shape.batch(CPU)
    expected = canvas_attention(
        *batch.arguments(AttentionOptions(0.25, window=shape.options().window))
    )
    live = slice(batch.num_live_tokens)
    torch.testing.assert_close(attention_call(shape, "reference", CPU)()[live], expected[live])
    step = KernelCase("step graph", "sampler", "plain", (served().step,))
    heads: list[torch.Tensor] = []
    monkeypatch.setattr(timing, "settle", lambda rows, weight: heads.append(rows))
    outputs: Any = Timer(lambda call, device: call)(step, CPU).call()
    assert [output.tokens.shape for output in outputs] == [(2, 8)] * 3
    # Rows of the second step, and of the third.
    assert [len(rows) for rows in heads] == [8, 16]
    monkeypatch.undo()
    weight = torch.randn(50, 64)
    rows = torch.randn(4, 64)
    untouched = rows[1::2].clone()
    settle(rows[::2], weight)
    assert (rows[::2] @ weight.T).softmax(-1).amax(-1).min() > 0.99
    assert torch.equal(rows[1::2], untouched)
