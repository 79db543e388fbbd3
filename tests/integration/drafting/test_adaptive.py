"""Levels that change from step to step: the target's own tokens, and no draft where none pays."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.support import drafts
from tests.support.draft_engine import NUM_DRAFTS, OPTIONS, PROMPTS, generate, metric
from tests.support.engine import TracedEngine
from vllm_diffusion.drafting.adaptive import Costs
from vllm_diffusion.drafting.untrained_eagle3 import untrained_eagle3

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS = {"additional_config": {"drafting": {"adaptive": True}}}


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def engine(request: Any, tmp_path: Path) -> Any:
    """A random draft: nothing of it is accepted but by chance."""
    draft = drafts.save_draft(tmp_path / "draft")
    made = TracedEngine(
        drafts.save_target("qwen3", tmp_path / "target"),
        **(OPTIONS | SETTINGS | {"disable_log_stats": False, "async_scheduling": request.param}),
        speculative_config={
            "method": "dflash",
            "model": str(draft),
            "num_speculative_tokens": NUM_DRAFTS,
        },
    )
    yield made
    made.close()


def test_levels(engine: TracedEngine, models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level of a script in every step, and then those that are chosen."""
    expected = [drafts.greedy_tokens(models["qwen3"], prompt, 30) for prompt in PROMPTS]

    def assert_says_them() -> None:
        for prompts in (PROMPTS, PROMPTS[3:5]):
            for prompt, output in zip(prompts, generate(engine, prompts), strict=True):
                assert list(output.outputs[0].token_ids) == expected[PROMPTS.index(prompt)]

    draft = engine.scheduler.draft
    assert draft.levels == (0, 1, 3, 7)
    script = itertools.cycle([7, 0, 3, 3, 1, 7, 7, 0, 0, 1])
    with monkeypatch.context() as patched:
        patched.setattr(draft, "choose", lambda *load: next(script))
        assert_says_them()
    drafted = metric(engine, "num_draft_tokens")
    assert 0 < drafted < NUM_DRAFTS * metric(engine, "num_drafts")

    # A table of costs that does not depend on this machine: each drafted token costs a fifth.
    draft.costs = Costs()
    observe = draft.observe
    monkeypatch.setattr(
        draft,
        "observe",
        lambda verified, drafted, num_reqs, tokens, seconds, accepted: observe(
            verified, drafted, num_reqs, tokens, 1 + verified / 5, accepted
        ),
    )
    for _ in range(3):
        assert_says_them()
    before = metric(engine, "num_draft_tokens"), metric(engine, "num_drafts")
    assert_says_them()
    # Probes are left.
    num_steps = 2 * 30
    assert metric(engine, "num_drafts") - before[1] < num_steps
    assert draft.choose(["a", "b"], 100) in draft.levels


@pytest.mark.parametrize("max_num_seqs", [8, 1])
def test_draft_that_is_always_right(max_num_seqs: int, models: Any, tmp_path: Path) -> None:
    """The longest level, by vLLM's own method of a smaller model; one request at a time too."""
    spec = {
        "method": "draft_model",
        "model": str(drafts.save_target("qwen3", tmp_path / "same")),
        "num_speculative_tokens": 3,
    }
    engine = TracedEngine(
        drafts.save_target("qwen3", tmp_path / "target"),
        **(OPTIONS | SETTINGS | {"max_num_seqs": max_num_seqs}),
        disable_log_stats=False,
        async_scheduling=False,
        speculative_config=spec,
    )
    try:
        draft = engine.scheduler.draft
        observe = draft.observe
        draft.observe = lambda verified, drafted, num_reqs, tokens, seconds, accepted: observe(
            verified, drafted, num_reqs, tokens, 1 + verified / 5, accepted
        )
        for prompt, output in zip(PROMPTS, generate(engine, PROMPTS), strict=True):
            assert list(output.outputs[0].token_ids) == drafts.greedy_tokens(
                models["qwen3"], prompt, 30
            )
        before = metric(engine, "num_draft_tokens"), metric(engine, "num_drafts")
        generate(engine, PROMPTS)
        drafted, verified = (
            metric(engine, name) - old
            for name, old in zip(("num_draft_tokens", "num_drafts"), before, strict=True)
        )
        assert drafted > 2.5 * verified
    finally:
        engine.close()


@pytest.mark.parametrize("method", ["ngram", "eagle3"])
def test_levels_of_other_methods(
    method: str, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A level of a script in every step here too."""
    target = drafts.save_target("qwen3", tmp_path / "target")
    spec = untrained_eagle3(target, tmp_path / "head", 4)
    if method == "ngram":
        spec = {"method": method, "num_speculative_tokens": 4}
        spec |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    options = OPTIONS | SETTINGS | {"disable_log_stats": False}
    engine = TracedEngine(target, **options, speculative_config=spec)
    try:
        draft = engine.scheduler.draft
        assert draft.levels == (0, 1, 2, 4)
        script = itertools.cycle([4, 0, 2, 2, 1, 4, 4, 0, 0, 1])
        monkeypatch.setattr(draft, "choose", lambda *load: next(script))
        for prompt, output in zip(PROMPTS, generate(engine, PROMPTS), strict=True):
            expected = drafts.greedy_tokens(models["qwen3"], prompt, 30)
            assert list(output.outputs[0].token_ids) == expected
        drafted, verified = metric(engine, "num_draft_tokens"), metric(engine, "num_drafts")
        assert 0 < drafted < 4 * verified
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({}, "adaptive=true needs a draft"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "a scheduler of its own"),
    ],
    ids=["no draft", "another scheduler"],
)
def test_refused(options: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    if options:
        options["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 3}
    target = drafts.save_target("qwen3", tmp_path / "target")
    with pytest.raises(ValueError, match=sentence):
        EngineArgs(model=str(target), **OPTIONS, **SETTINGS, **options).create_engine_config()
