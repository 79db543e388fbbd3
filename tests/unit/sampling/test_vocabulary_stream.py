"""Streamed logits are sampled from the exact distribution, whatever the tiles and ranks."""

import math
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vllm.v1.outputs import LogprobsTensors

from attention_kernels.testing import make_adjustments
from attention_kernels.testing import make_draws as random_draws
from attention_kernels.vocab_statistics import RowDraws, api, reference, triton
from tests.support.models.heads import identity_head, on_shards, output_head
from tests.support.models.row_settings import (
    Case,
    all_filters,
    bind,
    fake_penalties,
    filtered_probs,
    logits_of,
    row_adjustments,
    row_draws,
    sampling_params,
    top_logprobs,
)
from tests.support.oracles.kernel_checks import TensorMemory
from vllm_diffusion.canvas.pass_rows import rows_of
from vllm_diffusion.canvas.slots import SlotFeatures
from vllm_diffusion.decoding.rule import PositionStatistics
from vllm_diffusion.sampling import logprobs
from vllm_diffusion.sampling.candidate_filters import CandidateFilters, draw_filtered
from vllm_diffusion.sampling.logprobs import row_logprobs
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.vocabulary_stream import sample_rows


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.4},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"bias": {3: 2.0, 7: -1.5}},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05, "bias": {1: 1.0}},
    ],
    ids=str,
)
def test_candidates_follow_the_exact_distribution(params):
    """With fixed logits, draws of 20,000 seeds pass a chi-square test against float64."""
    rows, vocab = 20_000, 16
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(8)) * 1.5
    for token, bias in params.get("bias", {}).items():
        logits[token] += bias
    temperature = params.get("temperature", 1.0)
    filters = all_filters(
        torch.full((rows,), params.get("top_k", vocab)),
        torch.full((rows,), params.get("top_p", 1.0)),
        torch.full((rows,), params.get("min_p", 0.0)),
    )
    divisor = torch.tensor([temperature], dtype=torch.float64)
    expected = filtered_probs(logits[None].double(), divisor, rows_of(filters, slice(1)))[0]
    draws = row_draws(rows, temperature, torch.arange(rows) * 7919)
    head = identity_head(vocab)
    again = logits_of(head, logits.expand(rows, -1))
    drawn = draw_filtered(head, again, draws, filters, vocab).candidate
    counts = torch.bincount(drawn, minlength=vocab).double()
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    freedom = int(possible.sum()) - 1
    deviation = (counts - rows * expected)[possible] ** 2 / (rows * expected[possible])
    assert abs(deviation.sum().item() - freedom) < 5 * math.sqrt(2 * max(freedom, 1))


def assert_same(
    ours: tuple[PositionStatistics, LogprobsTensors],
    whole: tuple[PositionStatistics, LogprobsTensors],
) -> None:
    (ours, our_reports), (whole, reports) = ours, whole
    assert torch.equal(ours.candidate, whole.candidate)
    assert torch.equal(ours.argmax, whole.argmax)
    torch.testing.assert_close(ours.entropy, whole.entropy, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(ours.drawn_confidence, whole.drawn_confidence, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(ours.soft_embeds, whole.soft_embeds, rtol=1e-4, atol=1e-5)
    assert torch.equal(our_reports.logprob_token_ids, reports.logprob_token_ids)
    torch.testing.assert_close(our_reports.logprobs, reports.logprobs)
    assert torch.equal(our_reports.selected_token_ranks, reports.selected_token_ranks)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), vocab=st.integers(8, 200), tile=st.integers(1, 20))
def test_tiles_change_nothing(seed, vocab, tile):
    """Any tile size gives the same draws, log-probabilities and ranks for all settings."""
    case = Case(seed, vocab)
    assert_same(case.run(tile=4 * tile), case.run())


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.integers(16, 200),
    cuts=st.lists(st.integers(1, 40), min_size=1, max_size=3, unique=True),
)
# A row names the first id of the next rank; the last rank has no ids.
@example(seed=2, vocab=60, cuts=[1, 5, 9])
@example(seed=1, vocab=32, cuts=[8])
def test_ranks_change_nothing(seed, vocab, cuts):
    """Two to four tensor-parallel ranks, each with its own ids or none, give the results of one
    rank.
    """
    case = Case(seed, vocab)
    borders = sorted({4 * cut for cut in cuts if 4 * cut <= vocab} or {4})
    whole = case.run()
    for result in on_shards(case.weight, borders, 5.0, lambda head: case.run(head, 16)):
        assert_same(result, whole)


def test_rows_in_float32_change_nothing(monkeypatch):
    """Computing rows with log-probabilities a few at a time in float32 changes no result."""
    case = Case(3, 120)
    whole = case.run()
    monkeypatch.setattr(logprobs, "FLOAT32_BYTES", 0)
    assert_same(case.run(), whole)


@pytest.mark.parametrize("extras", ["plain", pytest.param("everything", marks=pytest.mark.slow)])
def test_peak_memory(monkeypatch, extras):
    """Sampling needs at most a byte per logit, also when rows are projected again."""
    monkeypatch.setattr(logprobs, "FLOAT32_BYTES", 0)
    monkeypatch.setattr(reference, "_TILE", 256)
    dtype = torch.bfloat16
    # A canvas has many rows for each table of the vocabulary that its request brings.
    rows, canvas, vocab, hidden = 64, 8, 2**13, 64
    generator = torch.Generator().manual_seed(0)
    head = output_head(torch.randn(vocab, hidden, generator=generator).to(dtype), 30.0)
    hidden_rows = torch.randn(rows, hidden).to(dtype)
    draws = row_draws(rows)
    penalties = fake_penalties(1, vocab, np.random.default_rng(0))
    adjustments = row_adjustments(penalties, vocab)
    params = sampling_params(
        has_penalties=True, logit_bias={5: 1.0}, allowed_token_ids=range(0, vocab, 9)
    )
    adjustments.add_request(0, params)
    bound = bind(adjustments, [rows])
    filters = all_filters(
        torch.full((rows,), 50), torch.full((rows,), 0.9), torch.full((rows,), 0.01)
    )
    is_plain = extras == "plain"
    with TensorMemory() as memory:
        results = sample_rows(
            head, hidden_rows, draws, None if is_plain else bound, 0, tile_size=128
        )
        if not is_plain:
            some = slice(canvas)
            logits = logits_of(head, hidden_rows[some], bound.rows(some))
            draw_filtered(head, logits, rows_of(draws, some), rows_of(filters, some), vocab)
            selected, divisor = results.argmax[some], torch.ones(canvas)
            row_logprobs(logits, divisor, selected, top_logprobs(5, canvas), head)
    assert memory.peak <= rows * vocab
    # No float32 tensor comes near the size of the logits.
    assert memory.largest_float32 <= rows * vocab / 32


@pytest.mark.parametrize(
    ("dtype", "temperatures"),
    [
        (torch.float32, [1e-4, 1e-2, 1.0, 1e2, 1e4]),
        (torch.bfloat16, [1e-4, 1e-2, 1.0, 1e2, 1e4]),
        (torch.float16, [1e-4, 1e-2, 1.0, 1e2, 1e3]),
    ],
    ids=str,
)
@pytest.mark.parametrize("borders", [[], [8]], ids=str)
def test_never_drawn_ids(dtype, temperatures, borders):
    """A never-drawn id is neither argmax nor candidate, however likely the model finds it."""
    n, vocab, never = 600, 12, (2, 9)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, 4, generator=generator).to(dtype)
    rows = torch.randn(n, 4, generator=generator).to(dtype)
    weight[list(never)] = 0.0
    rows[:, 0], weight[list(never), 0] = 1.0, 30.0
    others = [token for token in range(vocab) if token not in never]
    for temperature in temperatures:
        draws = row_draws(n)._replace(temperature=torch.full((n,), temperature))
        draws.request_temperature[::5] = 0.0
        filters = all_filters([vocab] * n, [0.99] * n, [0.0] * n)

        def run(head: Any, draws: RowDraws = draws, filters: Any = filters) -> Any:
            head = replace(head, never_drawn=never, embedding=None)
            results = sample_rows(head, rows, draws, None, 0, 4)
            return results, *draw_filtered(head, logits_of(head, rows), draws, filters, vocab)[:2]

        logits = (rows @ weight[others].T).double() / temperature
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        for results, candidate, drawn_confidence in on_shards(weight, borders, None, run):
            for drawn in (results.argmax, results.candidate, candidate):
                assert not torch.isin(drawn, torch.tensor(never)).any()
            for confidence in (results.drawn_confidence, drawn_confidence):
                assert confidence.isfinite().all()
            torch.testing.assert_close(results.entropy.double(), entropy, rtol=1e-3, atol=1e-3)


def test_a_filter_leaves_its_neighbours_alone():
    """A row without a filter draws the same candidate whether or not other rows have one."""
    rows, vocab = 40, 64
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 2
    head, draws = identity_head(vocab), row_draws(rows)
    plain = sample_rows(head, logits, draws, None, 0)
    top_k = torch.where(torch.arange(rows) % 2 == 0, 1, vocab)
    filters = CandidateFilters(top_k, None, None)
    candidate = draw_filtered(head, logits_of(head, logits), draws, filters, vocab).candidate
    assert torch.equal(candidate[1::2], plain.candidate[1::2])
    assert torch.equal(candidate[::2], logits.argmax(-1)[::2])


def test_nothing_possible_is_no_nan():
    """A row for which settings leave no possible token still has finite results."""
    adjustments = row_adjustments(fake_penalties(1, 16, np.random.default_rng(0)), 16, prompt_len=0)
    # An end token that the model does not have is nobody's.
    params = sampling_params(allowed_token_ids=[3], min_tokens=1, all_stop_token_ids={3, 99})
    adjustments.add_request(0, params)
    # The second row is past the minimum.
    draws, bound = row_draws(2), bind(adjustments, [2])
    head, rows = identity_head(16), torch.zeros(2, 16)
    results = sample_rows(head, rows, draws, bound, 0, tile_size=8)
    assert torch.isfinite(results.soft_embeds).all()
    assert results.entropy.tolist() == [0.0, 0.0]
    assert results.confidence.tolist() == [0.0, 1.0]
    assert results.drawn_confidence.tolist() == [0.0, 1.0]
    filters = all_filters([5, 5], [0.5, 0.5], [0.1, 0.1])
    drawn_confidence = draw_filtered(head, logits_of(head, rows, bound), draws, filters, 16).share
    assert drawn_confidence.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("borders", [[], [24]], ids=str)
def test_tiles_without_an_allowed_id_change_no_bit(borders):
    """Skipping tiles without an allowed id, even all of a rank, changes no bit."""
    vocab, tile = 64, 8
    adjustments = row_adjustments(fake_penalties(2, vocab, np.random.default_rng(0)), vocab)
    allowed = ((41, 62), (42,))
    features = SlotFeatures()
    for slot, ids in enumerate(allowed):
        adjustments.add_request(slot, sampling_params(), ids)
        features.allowed_ids[slot] = ids
    assert features.held_to([0, 1]) == {41, 42, 62}
    assert features.held_to([0, 2]) is None
    bound, draws = bind(adjustments, [3, 2]), row_draws(5)
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(n, 16, generator=generator) for n in (vocab, 5))

    def run(head: Any) -> Any:
        ids = features.held_to([0, 1])
        few = sample_rows(head, rows, draws, bound, 0, tile, allowed_ids=ids)
        starts = [head.first_id + some.start for some in head.tiles(tile, ids)]
        return starts, few, sample_rows(head, rows, draws, bound, 0, tile)

    found = on_shards(weight, borders, 5.0, run)
    assert [start for starts, _, _ in found for start in starts] == [40, 56]
    for _, few, whole in found:
        for ours, theirs in zip(few, whole, strict=True):
            assert ours is theirs is None or torch.equal(ours, theirs)


@pytest.fixture(params=["reference", "triton"])
def implementation(request, monkeypatch):
    """Run everything in one implementation, as on a CPU or as on a GPU."""
    module = {"reference": reference, "triton": triton}[request.param]
    # Triton's interpreter keeps its state in globals, and ranks are threads here.
    lock = threading.Lock()

    def one_at_a_time(function: Any) -> Any:
        def call(*args: Any) -> Any:
            with lock:
                return function(*args)

        return call

    serial = SimpleNamespace(
        **{name: one_at_a_time(getattr(module, name)) for name in triton.__all__}
    )
    monkeypatch.setattr(api, "_implementation", lambda impl, rows: serial)


def test_a_token_counts_itself(implementation):
    """The likeliest token has rank 1 and the score of the first column, capped or not."""
    generator = torch.Generator().manual_seed(0)
    rows = 16
    logits = torch.randn(rows, 100, generator=generator) * 20
    head = output_head(torch.eye(100), 30.0)
    temperature = torch.rand(rows, generator=generator) + 0.5
    likeliest = sample_rows(head, logits, row_draws(rows), None, 0).argmax
    logprobs = row_logprobs(
        logits_of(head, logits), temperature, likeliest, top_logprobs(1, rows), head
    )
    assert (logprobs.selected_token_ranks == 1).all()
    assert torch.equal(logprobs.logprobs[:, 0], logprobs.logprobs[:, 1])


@pytest.mark.parametrize(
    ("implementation", "max_examples"),
    [("reference", 10), ("triton", 3)],
    indirect=["implementation"],
)
def test_logprobs_are_those_of_vllm(implementation, max_examples):
    """Scores and ranks equal those of vLLM's function over whole rows of the same logits."""
    from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores

    @settings(max_examples=max_examples, deadline=None)
    @given(seed=st.integers(0, 2**31), vocab=st.integers(8, 200), raw=st.booleans())
    def every_case(seed, vocab, raw):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(6, vocab, generator=generator) * 4
        temperature = torch.rand(6, generator=generator) + 0.5
        head, wanted = identity_head(vocab), top_logprobs(4, 6, as_logits=raw)
        ours = row_logprobs(logits_of(head, logits), temperature, logits.argmax(-1), wanted, head)
        stock = compute_topk_scores(
            (logits / temperature[:, None]).contiguous(), 4, logits.argmax(-1), logits_mode=raw
        )
        assert torch.equal(ours.logprob_token_ids, stock.logprob_token_ids.long())
        torch.testing.assert_close(ours.logprobs, stock.logprobs)
        assert torch.equal(ours.selected_token_ranks, stock.selected_token_ranks)

    every_case()


def test_min_p_of_one_draws_the_argmax(implementation):
    """With min-p of 1 the argmax is drawn, whichever implementation computed the statistics."""
    rows, vocab = 16, 64
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 9
    head = output_head(torch.eye(vocab), 30.0)
    draws = row_draws(rows)._replace(temperature=torch.full((rows,), 0.7))
    filters = CandidateFilters(None, None, torch.ones(rows))
    again = logits_of(head, logits)
    candidate, drawn_confidence, *_ = draw_filtered(head, again, draws, filters, vocab)
    assert torch.equal(candidate, logits.argmax(-1))
    # Nothing else is kept.
    assert torch.equal(drawn_confidence, torch.ones(rows))


FILTERS = [(), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p", "min_p")]
# The kernels take seconds under the interpreter.
DRAWN = [("reference", borders, used) for borders in ([], [12, 60]) for used in FILTERS]
DRAWN += [pytest.param("triton", [], used, marks=pytest.mark.slow) for used in ((), ("top_p",))]


@pytest.mark.parametrize(
    ("implementation", "borders", "used"), DRAWN, ids=str, indirect=["implementation"]
)
def test_drawn_confidence_is_the_probability_of_the_candidate(implementation, used, borders):
    """The confidence is the candidate's probability in float64, on one to four ranks.

    It is taken at the schedule's temperature without a filter, and at the draw's with one.
    """
    n, vocab = 12, 150
    generator = torch.Generator().manual_seed(len(borders) + 1)
    weight = torch.randn(vocab, 8, generator=generator)
    rows = torch.randn(n, 8, generator=generator) * 2
    draws = random_draws(n, generator)
    adjustments = make_adjustments(n, vocab, generator)
    some = torch.arange(0, n, 2)
    values = {
        "top_k": torch.randint(1, 40, (len(some),), generator=generator),
        "top_p": torch.rand(len(some), generator=generator) * 0.9 + 0.05,
        "min_p": torch.rand(len(some), generator=generator) * 0.3,
    }
    filters = CandidateFilters(*(values[name] if name in used else None for name in values))

    def run(head: OutputHead) -> PositionStatistics:
        results = sample_rows(head, rows, draws, adjustments, 0, 16)
        if not used:
            return results
        again = logits_of(head, rows[some], adjustments.rows(some))
        drawn = draw_filtered(head, again, rows_of(draws, some), filters, vocab)
        return results._replace(
            candidate=results.candidate.index_copy(0, some, drawn[0]),
            drawn_confidence=results.drawn_confidence.index_copy(0, some, drawn[1]),
        )

    logits = torch.tanh(rows @ weight.T / 5.0) * 5.0
    logits = adjustments.apply(logits, torch.arange(vocab)).double()
    temperature = draws.temperature.double()
    probs = (logits / temperature[:, None]).softmax(-1)
    if used:
        divisor = (temperature * draws.rate.double())[some]
        probs[some] = filtered_probs(logits[some], divisor, filters)
    for results in on_shards(weight, borders, 5.0, run):
        exact = probs.gather(1, results.candidate[:, None])[:, 0]
        assert (exact > 0).all()
        ours = results.drawn_confidence
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-30)
        likeliest = results.candidate == results.argmax
        if used:
            likeliest[some] = False
        assert 0 < likeliest.sum() < n
        assert torch.equal(ours[likeliest], results.confidence[likeliest])
