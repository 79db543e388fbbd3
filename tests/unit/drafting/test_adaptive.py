"""The number of drafts of each step, judged by a scripted table of steps' costs on several kinds of
traffic.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pytest

from vllm_diffusion.drafting.adaptive import AdaptiveDraft

LEVELS = (1, 3, 7)
KNOWN, UNKNOWN, HALF = 0.95, 0.05, 0.6


@dataclass(frozen=True)
class Machine:
    """Milliseconds of a step.

    Attributes:
        name: Of the test.
        weights: Of reading them, whatever the rows.
        row: Of computing a row, where that takes longer.
        kv: Of reading a thousand tokens of a request's cache.
        draft: Of a draft pass.
        kv_of_draft: As ``kv``, for a draft that sees all of it.
    """

    name: str
    weights: float
    row: float
    kv: float
    draft: float
    kv_of_draft: float = 0.0

    def step(self, verified: int, drafted: int, num_reqs: int, tokens: float) -> float:
        rows = num_reqs * (1 + verified)
        verify = max(self.weights, self.row * rows) + self.kv * num_reqs * tokens / 1000
        if not drafted:
            return verify
        return verify + self.draft + self.kv_of_draft * num_reqs * tokens / 1000


# A GPU that waits for its memory; a CPU, whose rows cost; a draft that a long context makes slow.
GPU = Machine("gpu", weights=10, row=0.04, kv=0.05, draft=1.5)
CPU = Machine("cpu", weights=2, row=1.5, kv=0.1, draft=2)
LONG = Machine("long context", weights=10, row=0.04, kv=0.05, draft=1.5, kv_of_draft=0.2)
# The tiny pair on a core, as it was measured: half of a step is the draft.
TINY = Machine("tiny pair", weights=5.9, row=0.86, kv=0.1, draft=4)


def traffic(phases: list[tuple[float, int]]) -> list[float]:
    """Return, for each token to generate, how likely its draft is right if its predecessors are
    right.
    """
    return [rate for rate, num_tokens in phases for _ in range(num_tokens)]


def cost(
    machine: Machine,
    texts: list[list[float]],
    num_reqs: int,
    prompt: int,
    level: int | AdaptiveDraft,
    seed: int = 0,
    busy: float = 0.0,
) -> float:
    """Milliseconds to answer with all of ``texts``, ``num_reqs`` at a time; noise of a tenth on
    each step.

    Of a share ``busy`` of the steps the clock shows up to four times as much, since the machine
    does something else too; that is not counted, since it would have been so at any level.
    """
    draws = random.Random(seed)
    waiting = dict(enumerate(texts))
    said: dict[int, int] = {}
    verified, total = 0, 0.0
    while waiting or said:
        fresh = list(waiting)[: num_reqs - len(said)]
        said |= dict.fromkeys(fresh, 0)
        for request in fresh:
            del waiting[request]
        mean = prompt + sum(said.values()) / len(said)
        is_adaptive = isinstance(level, AdaptiveDraft)
        drafted = level.choose([str(request) for request in said], mean) if is_adaptive else level
        accepted: dict[str, int] = {}
        for request in said:
            # Of a request that has just come there is no draft yet.
            length = 0 if request in fresh else verified
            drafts = texts[request][said[request] : said[request] + length]
            wrong = (i for i, rate in enumerate(drafts) if draws.random() >= rate)
            kept = next(wrong, len(drafts))
            if length:
                accepted[str(request)] = kept
            said[request] += kept + 1
        num_rows = verified if accepted else 0
        spent = machine.step(num_rows, drafted, len(said), mean) * draws.uniform(0.95, 1.05)
        total += spent
        if busy and draws.random() < busy:
            spent *= draws.uniform(1, 4)
        # Steps of prompts are no measure, and the scheduler leaves them out.
        if is_adaptive and not fresh:
            level.observe(verified, drafted, len(said), mean, spent / 1000, accepted)
        said = {request: count for request, count in said.items() if count < len(texts[request])}
        verified = drafted
    return total


ALTERNATING = [(KNOWN, 600), (UNKNOWN, 300)] * 3


def cost_to_best(
    machine: Machine,
    texts: list[list[float]],
    num_reqs: int,
    prompt: int,
    num_seeds: int = 1,
    busy: float = 0.0,
) -> float:
    """Return the cost of adapting as a multiple of the cost of the best fixed level, 0 included."""

    def mean(level: int | None) -> float:
        # What is accepted by chance differs between two levels too.
        return fmean(
            cost(
                machine,
                texts,
                num_reqs,
                prompt,
                AdaptiveDraft(LEVELS) if level is None else level,
                seed,
                busy,
            )
            for seed in range(num_seeds)
        )

    return mean(None) / min(mean(level) for level in (0, *LEVELS))


def loads(
    always: Iterable[tuple[Machine, int, int]], slow: Iterable[tuple[Machine, int, int]]
) -> Any:
    """Requests at a time and tokens of their prompts, by machine."""
    marked = [*((load, ()) for load in always), *((load, pytest.mark.slow) for load in slow)]
    return pytest.mark.parametrize(
        ("machine", "num_reqs", "prompt"),
        [
            pytest.param(*load, id=f"{load[0].name}-{load[1]}-{load[2]}", marks=marks)
            for load, marks in marked
        ],
    )


# A long context matters most where it makes the draft dear.
@loads(((GPU, 1, 100), (LONG, 1, 60_000)), slow=((CPU, 1, 100), (LONG, 1, 100), (GPU, 8, 500)))
@pytest.mark.parametrize(
    "phases",
    [ALTERNATING, [(KNOWN, 1500)], [(UNKNOWN, 1500)], [(HALF, 1500)]],
    ids=["alternating", "known", "unknown", "half"],
)
def test_cost(
    machine: Machine, num_reqs: int, prompt: int, phases: list[tuple[float, int]]
) -> None:
    """Adapting costs at most 1.05 times as much as no draft or the best fixed level, probing
    included.
    """
    assert cost_to_best(machine, [traffic(phases)] * num_reqs, num_reqs, prompt, 3) <= 1.05


REQUESTS = {
    "every other": [traffic([(rate, 40)]) for _ in range(30) for rate in (KNOWN, UNKNOWN)],
    "every other, short ones unknown": [
        traffic([phase]) for _ in range(30) for phase in ((KNOWN, 60), (UNKNOWN, 20))
    ],
    "ten and ten": [
        traffic([(rate, 40)]) for _ in range(3) for rate in (KNOWN, UNKNOWN) for _ in range(10)
    ],
    "short ones unknown": [traffic([(UNKNOWN, 20)])] * 60,
}


# What waits for its memory, and what was measured.
@loads([(TINY, 1, 100)], slow=((GPU, 1, 100), (TINY, 8, 100)))
@pytest.mark.parametrize("requests", REQUESTS)
def test_cost_of_requests(machine: Machine, num_reqs: int, prompt: int, requests: str) -> None:
    """Adapting costs at most 1.05 times as much as the best fixed level where answers are short and
    requests of different kinds follow each other.
    """
    assert cost_to_best(machine, REQUESTS[requests] * num_reqs, num_reqs, prompt, 2) <= 1.05


@pytest.mark.parametrize(
    ("machine", "texts", "prompt", "bound"),
    [
        (TINY, REQUESTS["every other, short ones unknown"], 100, 0.85),
        (LONG, [traffic(ALTERNATING)], 60_000, 0.8),
    ],
    ids=["requests", "text"],
)
def test_no_fixed_level_is_as_cheap(
    machine: Machine, texts: list[list[float]], prompt: int, bound: float
) -> None:
    """Adapting is cheaper than every fixed level where short answers that the draft does not know
    come between others, and where the text changes.
    """
    assert cost_to_best(machine, texts, 1, prompt) < bound


@pytest.mark.parametrize("rate", [UNKNOWN, pytest.param(0.33, marks=pytest.mark.slow)])
def test_busy_machine(rate: float) -> None:
    """Steps that take long because the machine is busy do not make drafts seem to pay where they do
    not.
    """
    # The tiny pair's, nearly, on two cores.
    machine = Machine("busy", weights=9, row=1.3, kv=0.1, draft=10)
    assert cost_to_best(machine, [traffic([(rate, 1500)])], 1, 100, 5, busy=0.3) <= 1.1


def levels(draft: AdaptiveDraft, num_steps: int, right: bool) -> list[int]:
    """Return the levels chosen for one request on the GPU above, whose drafts are all right or all
    wrong.
    """
    chosen, verified = [], 0
    for _ in range(num_steps):
        drafted = draft.choose(["one"], 1000)
        accepted = {"one": verified if right else 0} if verified else {}
        draft.observe(verified, drafted, 1, 1000, GPU.step(verified, drafted, 1, 1000), accepted)
        verified = drafted
        chosen.append(drafted)
    return chosen


def test_down_and_up() -> None:
    """Wrong drafts bring the level to 0 within some steps, with a probe now and then, and right
    drafts bring it back.
    """
    draft = AdaptiveDraft(LEVELS)
    assert set(levels(draft, 100, right=True)[20:]) == {7}
    wrong = levels(draft, 400, right=False)
    assert set(wrong[:10]) == {7}
    assert wrong[40:].count(0) > 0.9 * 360
    assert any(wrong[40:])
    assert set(levels(draft, 400, right=True)[300:]) == {7}


def test_long_prompts_before_anything_is_measured() -> None:
    """The longest draft is chosen until a step is measured, since steps of prompts have no cost to
    compare.
    """
    draft = AdaptiveDraft(LEVELS)
    assert [draft.choose(["one"], 60_000) for _ in range(20)][6:] == [draft.levels[-1]] * 14
    draft.observe(draft.levels[-1], draft.levels[-1], 1, 60_000, 1.0, {"one": 1})
    assert draft.choose(["one"], 60_000) in draft.levels


def test_another_draft() -> None:
    """After a swap what was learned of the old draft is forgotten, so a good new one is used at
    once although nothing was drafted before.
    """
    draft = AdaptiveDraft(LEVELS)
    longest = draft.levels[-1]
    for _ in range(60):
        level = draft.choose(["one"], 100)
        draft.observe(level, level, 1, 100, 1 + level / 5, {"one": 0} if level else {})
    assert draft.choose(["one"], 100) == 0
    draft.forget_acceptance()
    for _ in range(10):
        level = draft.choose(["one"], 100)
        assert level == longest
        draft.observe(level, level, 1, 100, 1 + level / 5, {"one": level})
