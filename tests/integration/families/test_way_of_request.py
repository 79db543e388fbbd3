"""Tests of requests that choose their way to decode, of DiffusionGemma and Nemotron."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.families import test_linear_spec as nemotron
from tests.integration.families.test_two_ways import OPTIONS, params
from tests.support.counters.row_counts import RowCounter, RowCounts
from tests.support.engines.engine import SYNCHRONOUS_OFTEN, TracedEngine, tokens_of
from tests.support.families.model import prompt_of
from tests.support.models.checkpoints import random_checkpoint
from tests.support.models.drafts import greedy_tokens
from tests.support.oracles.gemma4 import encoder_as_gemma4, logits_of
from vllm_diffusion.metrics import request_metrics

pytestmark = pytest.mark.engine

WAYS = ("entropy_bound", "linear_spec", "autoregressive")


def chosen(way: str, **changes: Any) -> Any:
    """Return the parameters of a request that chooses its way."""
    return params(**changes, extra_args={"diffusion_rule": way})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("ways"))


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Any:
    return encoder_as_gemma4(checkpoint)


def options(is_async: bool, **settings: Any) -> dict[str, Any]:
    """Return options of an engine."""
    return OPTIONS | {"additional_config": {"diffusion": settings}, "async_scheduling": is_async}


@pytest.fixture(scope="module", params=SYNCHRONOUS_OFTEN)
def engine(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[TracedEngine]:
    with TracedEngine(checkpoint, **options(request.param, rules=WAYS)) as served:
        yield served


def test_mixed_batch(engine: TracedEngine, oracle: Any) -> None:
    """In one batch with preemptions, requests of three ways get the tokens that each gets alone."""
    prompts, wanted = [], []
    for i, length in enumerate((2, 64, 33, 150)):
        for j, way in enumerate(WAYS):
            prompts.append(prompt_of(length, seed=10 * i + j))
            wanted.append(chosen(way, temperature=float(i < 2), seed=i, logprobs=2, min_tokens=3))
    alone = [engine.outputs([prompt], one)[0] for prompt, one in zip(prompts, wanted, strict=True)]
    assert engine.llm.reset_prefix_cache()
    engine.preempted.clear()
    mixed = engine.outputs(prompts, wanted)
    assert engine.preempted
    assert tokens_of(mixed) == tokens_of(alone)
    for prompt, one, ours, lone in zip(prompts, wanted, mixed, alone, strict=True):
        (completion,), (other,) = ours.outputs, lone.outputs
        tokens = list(completion.token_ids)
        assert len(tokens) == 30
        for row, same in zip(completion.logprobs, other.logprobs, strict=True):
            assert {token: each.logprob for token, each in row.items()} == pytest.approx(
                {token: each.logprob for token, each in same.items()}, abs=1e-3
            )
        if one.extra_args["diffusion_rule"] == WAYS[0]:
            continue
        exact = logits_of(oracle, [*prompt, *tokens])[len(prompt) - 1 : -1]
        if one.temperature == 0.0:
            assert tokens == exact.argmax(-1).tolist()
        for row, expected in zip(completion.logprobs, exact.log_softmax(-1), strict=True):
            for token, each in row.items():
                assert each.logprob == pytest.approx(float(expected[token]), abs=2e-5)


def test_way_of_each_turn(engine: TracedEngine, oracle: Any) -> None:
    """A conversation with another way in each turn answers from the cache as without it."""
    assert engine.llm.reset_prefix_cache()
    known, turns = prompt_of(60, seed=41), []
    for i, way in enumerate(("autoregressive", "entropy_bound", "linear_spec", "entropy_bound")):
        (output,) = engine.outputs([known], chosen(way, max_tokens=70))
        turns.append((known, way, tokens_of([output])[0]))
        assert i == 0 or output.num_cached_tokens >= len(turns[i - 1][0])
        known = known + turns[-1][2] + prompt_of(3, seed=i)
        if len(known) > 180:
            break
    assert engine.llm.reset_prefix_cache()
    for prompt, way, tokens in turns:
        assert tokens_of(engine.outputs([prompt], chosen(way, max_tokens=70))) == [tokens]
        assert engine.llm.reset_prefix_cache()
        if way == "autoregressive":
            assert tokens == greedy_tokens(oracle, prompt, 70)


def test_passes_of_each_way(engine: TracedEngine) -> None:
    """A single token takes one pass, and a draft takes a step and a verification."""
    outputs = [
        engine.outputs([prompt_of(20, seed=6)], chosen(way, max_tokens=12))[0] for way in WAYS[1:]
    ]
    drafted, single = (request_metrics(output.outputs[0]) for output in outputs)
    assert drafted is not None
    assert single is not None
    assert single.passes == 1 + 12
    assert set(drafted.denoise_steps_per_canvas) == {1}
    assert drafted.passes == 1 + 2 * len(drafted.denoise_steps_per_canvas)


@pytest.mark.parametrize("is_async", SYNCHRONOUS_OFTEN)
def test_passes_of_diffusion(checkpoint: Path, is_async: bool) -> None:
    """Denoised requests take the passes, rows and tokens of a server without other ways."""
    prompts = [prompt_of(length, seed=length) for length in (3, 40, 70, 20)]
    found: list[tuple[RowCounts, list[list[int]]]] = []
    for settings in ({}, {"rules": WAYS}):
        with TracedEngine(checkpoint, **options(is_async, **settings)) as served:
            counter = RowCounter(served.llm)
            outputs = served.outputs(prompts, params(max_tokens=70))
            found.append((counter.counts, tokens_of(outputs)))
    assert found[0] == found[1]
    assert found[0][0].denoised > 0


@pytest.mark.parametrize("is_async", SYNCHRONOUS_OFTEN)
def test_masked_model(tmp_path: Path, is_async: bool) -> None:
    """Denoised blocks next to causal tokens and drafts are those of a server of blocks alone."""
    model = nemotron.agreeing_model("nemotron")
    folder = model.save(tmp_path / "model")
    ways = ("reveal", *WAYS[1:])
    prompts = [prompt_of(length, seed=length) for length in (1, 7, 9, 64, 81, 120)]
    fields = [{"seed": i, "temperature": 0.8 * (i % 2), "logprobs": 1} for i in range(len(prompts))]
    with TracedEngine(folder, **nemotron.OPTIONS, async_scheduling=is_async) as blocks:
        counter = RowCounter(blocks.llm)
        denoised = blocks.outputs(prompts, [params(**one) for one in fields])
        read = counter.counts.read
    mixed = options(is_async, rules=ways) | nemotron.OPTIONS
    with TracedEngine(folder, **mixed) as served:
        counter = RowCounter(served.llm)
        alone = served.outputs(prompts, [params(**one) for one in fields])
        assert counter.counts.read == read
        wanted = [chosen(way, **one) for one in fields for way in ways]
        found = served.outputs([prompt for prompt in prompts for _ in ways], wanted)
        drafts = [
            served.outputs([prompt], chosen("linear_spec", **one))[0].outputs[0]
            for prompt, one in zip(prompts, fields, strict=True)
        ]
    assert tokens_of(alone) == tokens_of(denoised)
    for i, prompt in enumerate(prompts):
        blockwise, drafted, single = found[3 * i : 3 * i + 3]
        assert tokens_of([blockwise]) == tokens_of([denoised[i]])
        expected = nemotron.expected(model, prompt, params(**fields[i]))
        assert nemotron.MASK_ID not in expected
        assert tokens_of([drafted, single]) == [expected, expected]
        metrics = request_metrics(drafts[i])
        assert metrics is not None
        kept = nemotron.accepted(nemotron.drafting(model, prompt, params(**fields[i])))
        totals = [sum(kept[:n]) for n in range(1, 31)]
        num_drafts = 1 + sum(total < len(expected) for total in totals)
        assert len(metrics.denoise_steps_per_canvas) == num_drafts
        for ours, theirs in ((blockwise, denoised[i]), (drafted, single)):
            for row, other in zip(
                ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True
            ):
                for token, each in row.items():
                    assert each.logprob == pytest.approx(other[token].logprob, abs=1e-3)
