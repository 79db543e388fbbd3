"""Tests of how many rows DiffusionGemma runs for each token."""

from dataclasses import asdict

import pytest
from bench_passes import load, params

from tests.support.counters import baselines
from tests.support.counters.row_counts import RowCounter, RowCounts, serve
from tests.support.engines.engine import TracedEngine
from tests.support.models.checkpoints import SHIPPED

pytestmark = pytest.mark.engine

AT_ONCE = 8
NUM_REQUESTS = 16


@pytest.mark.parametrize(
    "order", [pytest.param("fused", marks=pytest.mark.slow), "asynchronous"], indirect=True
)
def test_rows_of_a_load(order):
    """A token takes no more rows than its baseline at any load, with the same canvases."""
    counts, answers = {}, {}
    with TracedEngine(
        SHIPPED,
        max_num_seqs=AT_ONCE,
        async_scheduling=order == "asynchronous",
        enable_prefix_caching=False,
    ) as engine:
        counter = RowCounter(engine.llm)
        prompts = load(engine.llm.get_tokenizer())[:NUM_REQUESTS]
        requests = [(prompt, params(order, seed)) for seed, prompt in enumerate(prompts)]
        for at_once in (1, AT_ONCE):
            counter.counts = RowCounts()
            outputs = serve(engine.llm, requests, at_once)
            answers[at_once] = [output.token_ids for output in outputs]
            num_tokens = sum(map(len, answers[at_once]))
            counts[f"{at_once} at once"] = {"tokens": num_tokens, **asdict(counter.counts)}
    assert answers[1] == answers[AT_ONCE]
    baselines.check(f"rows of a load, {order}", counts)
