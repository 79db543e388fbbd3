"""Tests of log-probabilities, rank and confidence of a draw from streamed logits."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.testing import make_adjustments
from attention_kernels.testing import make_draws as random_draws
from attention_kernels.vocab_statistics import api, reference, triton
from tests.support.models.heads import identity_head, on_shards, output_head
from tests.support.models.row_settings import filtered_probs, logits_of, row_draws, top_logprobs
from vllm_diffusion.canvas.pass_rows import rows_of
from vllm_diffusion.decoding.statistics import PositionStatistics
from vllm_diffusion.sampling.candidate_filters import CandidateFilters, draw_filtered
from vllm_diffusion.sampling.logprobs import row_logprobs
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.vocabulary_stream import sample_rows


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
