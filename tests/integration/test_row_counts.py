"""Rows that DiffusionGemma runs for each token, and what is left out of those that nothing reads."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from bench_passes import load, params

from tests.support import baselines
from tests.support.checkpoints import SHIPPED
from tests.support.engine import TracedEngine
from tests.support.row_counts import RowCounter, RowCounts, serve

pytestmark = pytest.mark.engine

AT_ONCE = 8
NUM_REQUESTS = 16


@pytest.fixture(scope="module")
def engine(order):
    engine = TracedEngine(
        SHIPPED,
        max_num_seqs=AT_ONCE,
        async_scheduling=order == "asynchronous",
        enable_prefix_caching=False,
        additional_config={"diffusion": {"fused_encode": False} if order == "separate" else {}},
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def counter(engine):
    return RowCounter(engine.llm)


@pytest.fixture(scope="module")
def prompts(engine):
    return load(engine.llm.get_tokenizer())[:NUM_REQUESTS]


def test_rows_of_a_load(engine, counter, prompts, order):
    """A token takes no more rows than it did, whoever shares its passes; its canvases are the same."""
    requests = [(prompt, params(order, seed)) for seed, prompt in enumerate(prompts)]
    counts, answers = {}, {}
    for at_once in (1, AT_ONCE):
        counter.counts = RowCounts()
        outputs = serve(engine.llm, requests, at_once)
        answers[at_once] = [output.token_ids for output in outputs]
        num_tokens = sum(map(len, answers[at_once]))
        counts[f"{at_once} at once"] = {"tokens": num_tokens, **asdict(counter.counts)}
    assert answers[1] == answers[AT_ONCE]
    baselines.check(f"rows of a load, {order}", counts)


def test_canvases_of_one_step_have_no_soft_embeddings(engine, counter, prompts):
    """Nothing would read them; all that is emitted is as it was with them."""
    requests = [(prompt, of_steps(engine, seed, 1)) for seed, prompt in enumerate(prompts[:3])]

    def answers(with_them: bool):
        counter.counts = RowCounts()
        with pytest.MonkeyPatch.context() as patch:
            if with_them:
                # As beside a request that takes more steps: the slots are never known to take one.
                patch.setattr(engine.slots.features, "takes_one_step", _Nothing())
            outputs = serve(engine.llm, requests, len(requests))
        emitted = [(output.token_ids, output.logprobs) for output in outputs]
        return emitted, counter.counts.sampled, counter.counts.embedded

    emitted, sampled, embedded = answers(with_them=True)
    assert embedded == sampled > 0
    assert answers(with_them=False) == (emitted, sampled, 0)


def of_steps(engine, seed, max_steps):
    """Parameters of a request whose canvases take so many steps at most."""
    extra_args = {"diffusion_max_steps": max_steps}
    return engine.sampling_params(seed=seed, max_tokens=48, logprobs=2, extra_args=extra_args)


class _Nothing(set):
    """A set that stays empty."""

    def add(self, element: int) -> None:
        pass


def test_a_canvas_of_more_steps_keeps_them_beside_one_of_one_step(engine, counter, prompts):
    """They share a product, which is left out of none of its rows or of all."""
    requests = [(prompts[steps], of_steps(engine, 0, steps)) for steps in (1, 3)]
    alone = [serve(engine.llm, [request], 1)[0].token_ids for request in requests]
    counter.counts = RowCounts()
    together = [output.token_ids for output in serve(engine.llm, requests, 2)]
    assert together == alone
    assert counter.counts.embedded >= 2 * 32
