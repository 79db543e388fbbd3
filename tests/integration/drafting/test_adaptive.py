"""Numbers of drafts that change from step to step: the target's own tokens, and no draft where none
pays.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.draft_engine import (
    PROMPTS,
    assert_greedy,
    draft_spec,
    generate,
    metric,
    serving,
)
from tests.support.engines.engine import TracedEngine
from vllm_diffusion.drafting.adaptive import Costs

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

ADAPTIVE = {"adaptive": True}


def at_scripted_costs(draft: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make each drafted token cost a fifth of a step, so that costs do not depend on this
    machine.
    """
    observe = draft.observe
    monkeypatch.setattr(
        draft,
        "observe",
        lambda verified, drafted, num_reqs, tokens, seconds, accepted: observe(
            verified, drafted, num_reqs, tokens, 1 + verified / 5, accepted
        ),
    )


def grown(engine: TracedEngine) -> list[Any]:
    """Return how many drafted tokens and verifications the same greedy answers add."""
    names = ("num_draft_tokens", "num_drafts")
    before = [metric(engine, name) for name in names]
    generate(engine, PROMPTS)
    return [metric(engine, name) - old for name, old in zip(names, before, strict=True)]


@pytest.mark.parametrize(
    ("method", "is_async", "levels", "script"),
    [
        ("dflash", False, (0, 1, 3, 7), [7, 0, 3, 3, 1, 7, 7, 0, 0, 1]),
        ("dflash", True, (0, 1, 3, 7), [7, 0, 3, 3, 1, 7, 7, 0, 0, 1]),
        ("ngram", True, (0, 1, 2, 4), [4, 0, 2, 2, 1, 4, 4, 0, 0, 1]),
        ("eagle3", True, (0, 1, 2, 4), [4, 0, 2, 2, 1, 4, 4, 0, 0, 1]),
    ],
)
def test_levels(
    method: str,
    is_async: bool,
    levels: tuple[int, ...],
    script: list[int],
    models: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers are the target's whether each step's number of drafts comes from a script or is
    chosen, and with chosen numbers random drafts are dropped because none pays.
    """
    spec = draft_spec(tmp_path, method)
    with serving(tmp_path, spec, ADAPTIVE, async_scheduling=is_async) as engine:
        draft = engine.scheduler.draft
        assert draft.levels == levels
        scripted = itertools.cycle(script)
        with monkeypatch.context() as patched:
            patched.setattr(draft, "choose", lambda *load: next(scripted))
            for prompts in (PROMPTS, PROMPTS[3:5]):
                assert_greedy(engine, models["qwen3"], prompts)
        drafted = metric(engine, "num_draft_tokens")
        assert 0 < drafted < levels[-1] * metric(engine, "num_drafts")
        if method != "dflash":
            return
        draft.costs = Costs()
        at_scripted_costs(draft, monkeypatch)
        for _ in range(3):
            assert_greedy(engine, models["qwen3"])
        # Probes are left, of the steps that 30 tokens take.
        assert grown(engine)[1] < 2 * 30
        assert draft.choose(["a", "b"], 100) in draft.levels


@pytest.mark.parametrize("max_num_seqs", [8, 1])
def test_draft_that_is_always_right(
    max_num_seqs: int, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a smaller model that is always right as the draft, the longest drafts are chosen in most
    steps, also where one request runs at a time.
    """
    options = {"max_num_seqs": max_num_seqs, "async_scheduling": False}
    with serving(tmp_path, draft_spec(tmp_path, "draft_model"), ADAPTIVE, **options) as engine:
        at_scripted_costs(engine.scheduler.draft, monkeypatch)
        assert_greedy(engine, models["qwen3"])
        drafted, verified = grown(engine)
        assert drafted > 2.5 * verified
