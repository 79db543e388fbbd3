"""Choice of what serves in place of the default: kernels that are right, and faster by enough."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from attention_kernels.canvas_attention import MAX_SPLITS
from attention_kernels.checks import AttentionShape
from vllm_diffusion.kernel_choice.cases import KernelCase, Role, Served
from vllm_diffusion.kernel_choice.process import Outcome
from vllm_diffusion.startup.kernel_choices import DEFAULT_KERNELS, KernelChoices

TIMING_COMMAND = (sys.executable, "-m", "vllm_diffusion.kernel_choice.timing")
# What must be gained for another choice than the default, and may be lost on no shape.
GAIN = 0.05
# How often each candidate is timed, in turns with the others.
ROUNDS = 5
# Most pieces that keys are cut into; the first is what serves untuned.
SPLITS = (MAX_SPLITS, 4, 2, 1)

Check = Callable[[KernelCase], Outcome]


@dataclass(frozen=True)
class Candidate:
    """One way to run a kernel.

    Attributes:
        name: What it is called for a reader.
        checks: Cases that must be right.
        timed: Cases for the clock, one for each shape that is served.
        adopt: Adds the way to the kernels that serve.
    """

    name: str
    checks: tuple[KernelCase, ...]
    timed: tuple[KernelCase, ...]
    adopt: Callable[[KernelChoices], KernelChoices]


@dataclass(frozen=True)
class Question:
    """A kernel that can run in several ways.

    Attributes:
        subject: The kernel.
        candidates: The ways; the first is the default.
    """

    subject: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Answer:
    """Outcome of a question.

    Attributes:
        subject: The kernel.
        chosen: Name of the way; ``None`` where none is right.
        microseconds: Time of all shapes together for each way that is right.
    """

    subject: str
    chosen: str | None
    microseconds: dict[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """Return the answer for a reader."""
        if self.chosen is None:
            return f"{self.subject}: nothing is chosen, since nothing was found right"
        default, mine = next(iter(self.microseconds.values())), self.microseconds[self.chosen]
        if mine >= default:
            return f"{self.subject}: {self.chosen}; nothing right is {GAIN:.0%} faster"
        gain = f"{1 - mine / default:.0%} less time than {next(iter(self.microseconds))}"
        return f"{self.subject}: {self.chosen}, {gain}"


def choose(times: Sequence[Sequence[float]]) -> int:
    """Choose among ways to run a kernel.

    Args:
        times: Time on each shape, for each way; the first is the default.

    Returns:
        Index of the way: the fastest that takes at least ``GAIN`` less time than the default on all
        shapes together, and on none ``GAIN`` more; else the default.
    """
    base = times[0]

    def is_faster(found: Sequence[float]) -> bool:
        limit = (1 - GAIN) * sum(base)
        no_shape_loses = all(a <= (1 + GAIN) * b for a, b in zip(found, base, strict=True))
        return sum(found) < sum(base) and sum(found) <= limit and no_shape_loses

    faster = [i for i, found in enumerate(times) if is_faster(found)]
    return min(faster, key=lambda i: sum(times[i]), default=0)


def attention_questions(
    served: Served, lengths: Sequence[int], requests: Sequence[int]
) -> Iterator[Question]:
    """Yield a question for each kind of layer in each kind of pass.

    Args:
        served: What is served.
        lengths: Tokens before a canvas.
        requests: Requests of a pass.
    """
    for role in served.roles():
        if role.kind is None or role.phase is None:
            continue
        cases = [case for case in role.cases if case.impl in ("triton", "cute")]
        ways = [(case, most) for case in cases for most in SPLITS]
        yield Question(
            f"attention of {role.cases[0].subject}",
            tuple(_way(role, *way, tuple(_passes(role, *way, lengths, requests))) for way in ways),
        )


def _way(role: Role, case: KernelCase, most: int, timed: tuple[KernelCase, ...]) -> Candidate:
    assert role.kind is not None
    assert role.phase is not None
    kind, phase = role.kind.name, role.phase

    def adopt(kernels: KernelChoices) -> KernelChoices:
        impls = {**kernels.attention.get(kind, {}), phase: case.impl}
        splits = {**kernels.most_splits.get(kind, {}), phase: most}
        return replace(
            kernels,
            attention={**kernels.attention, kind: impls},  # type: ignore[dict-item]
            most_splits={**kernels.most_splits, kind: splits},
        )

    cut = tuple(replace(shape, most_splits=most) for shape in _attention_shapes(case))
    return Candidate(
        f"{case.impl}, splits up to {most}", (replace(case, shapes=cut),), timed, adopt
    )


def _passes(
    role: Role, case: KernelCase, most: int, lengths: Sequence[int], requests: Sequence[int]
) -> Iterator[KernelCase]:
    """Yield the passes that a way of attention is timed on."""
    shape = min(_attention_shapes(case), key=lambda shape: shape.span)
    C = shape.rows[-1][0]
    for length in lengths:
        for n in requests:
            rest = ((C, 0),) * (n - 1)
            passes = {"denoise": (C, 0)} if role.phase == "denoise" else {}
            passes = passes or {"encoded canvas": (2 * C, C), "prompt": (4 * C, 4 * C)}
            for name, first in passes.items():
                subject = f"{case.subject}, {name}, {n} requests, {length} tokens"
                timed = replace(shape, rows=(first, *rest), context=length, most_splits=most)
                yield replace(case, subject=subject, shapes=(timed,))


def _attention_shapes(case: KernelCase) -> list[AttentionShape]:
    return [shape for shape in case.shapes if isinstance(shape, AttentionShape)]


def sampler_question(served: Served, vocab: int, requests: Sequence[int]) -> Question:
    """Return the question how the sampler goes over the vocabulary.

    Args:
        served: What is served.
        vocab: Ids of a rank.
        requests: Requests of a pass.
    """
    skips = (False, True) if served.step.is_self_conditioned else (False,)
    ways = itertools.product(skips, (False, True))
    return Question("sampler", tuple(_sampler_way(served, vocab, requests, *way) for way in ways))


def _sampler_way(
    served: Served, vocab: int, requests: Sequence[int], skips: bool, overlaps: bool
) -> Candidate:
    def adopt(kernels: KernelChoices) -> KernelChoices:
        return replace(kernels, skip_unlikely=skips, two_streams=overlaps)

    step = replace(served.step, kernels=adopt(DEFAULT_KERNELS))
    small = replace(served, kinds=(), step=step)
    name = f"skip_unlikely {str(skips).lower()}, {'two streams' if overlaps else 'one stream'}"
    timed = [
        KernelCase(
            "step graph", f"sampler, {n} requests", name, (replace(step, vocab=vocab, slots=n),)
        )
        for n in requests
    ]
    checks = [role.cases[0] for role in (*small.roles(), *small.graph_roles())]
    return Candidate(name, tuple(checks), tuple(timed), adopt)


def with_right_ways(question: Question, check: Check) -> Question:
    """Return the question with the ways that are known to be right; the first of these is the default."""
    ways = question.candidates
    right = (way for way in ways if all(check(case).state == "right" for case in way.checks))
    return replace(question, candidates=tuple(right))


def answer(
    question: Question, clock: Check, kernels: KernelChoices
) -> tuple[Answer, KernelChoices]:
    """Time the ways of a question in turns, and add the chosen one to the kernels.

    Args:
        question: The kernel and its ways that are right.
        clock: Times a case.
        kernels: Kernels that serve.
    """
    ways = question.candidates
    turns = [_turns(cases, clock) for cases in zip(*(way.timed for way in ways), strict=True)]
    # A shape that the default has no memory for is nobody's.
    rows = list(zip(*(times for times in turns if times[0] < math.inf), strict=True))
    if not rows:
        return Answer(question.subject, None), kernels
    way = ways[choose(rows)]
    totals = {each.name: sum(row) for each, row in zip(ways, rows, strict=True)}
    found = {name: round(total, 1) for name, total in totals.items() if total < math.inf}
    return Answer(question.subject, way.name, found), way.adopt(kernels)


def _turns(cases: Sequence[KernelCase], clock: Check) -> list[float]:
    """Return the median time of each case, in microseconds; infinite for one that cannot run."""
    found: list[list[float]] = [[] for _ in cases]
    for _ in range(ROUNDS):
        for times, case in zip(found, cases, strict=True):
            # What failed once is not waited for again.
            time = None if math.inf in times else clock(case).microseconds
            times.append(math.inf if time is None else time)
    return [math.inf if math.inf in times else statistics.median(times) for times in found]
