"""Tests of the tokens that top-k, top-p and min-p keep of a row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.vocab_statistics import (
    LogitAdjustments,
    RowDraws,
    RowLogits,
    ordered_keys,
)
from tests.support.models.heads import identity_head, on_shards, output_head
from tests.support.models.row_settings import (
    bind,
    fake_penalties,
    row_adjustments,
    row_draws,
    sampling_params,
)
from vllm_diffusion.decoding.rule import PositionStatistics
from vllm_diffusion.sampling import candidate_filters
from vllm_diffusion.sampling.candidate_filters import CandidateFilters, thresholds
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.vocabulary_stream import sample_rows

pytestmark = pytest.mark.engine


def kept_by(filters: CandidateFilters, logits: torch.Tensor) -> torch.Tensor:
    """Return which tokens the filters keep, as [num_rows, vocab_size], bool."""
    rows, ones = RowLogits(logits, 0), torch.ones(len(logits))
    keys = thresholds(rows, ones, logits.amax(-1), filters, logits.shape[1], output_head(logits))
    return ordered_keys(logits) >= keys[:, None]


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 20), vocab=st.integers(1, 60), seed=st.integers(0, 2**31))
def test_filters_keep_what_vllm_keeps(rows, vocab, seed):
    """Top-k and top-p keep what vLLM's PyTorch code keeps, and min-p follows its definition."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    top_k = torch.randint(1, vocab + 1, (rows,), generator=generator)
    top_p = torch.rand(rows, generator=generator).clamp(min=0.05)
    min_p = torch.rand(rows, generator=generator)

    stock = apply_top_k_top_p_pytorch(logits.clone(), top_k, top_p)
    assert torch.equal(kept_by(CandidateFilters(top_k, top_p, None), logits), stock > float("-inf"))
    probs = logits.double().softmax(-1)
    floor = min_p[:, None] * probs.amax(-1, keepdim=True)
    # Where a probability is the floor up to rounding, either is right.
    decided = (probs - floor).abs() > 1e-6 * floor
    ours = kept_by(CandidateFilters(None, None, min_p), logits)
    assert torch.equal(ours & decided, (probs >= floor) & decided)


def test_ties_with_the_last_token_kept_are_kept():
    """Tokens that tie with the last kept one are kept too."""
    logits = torch.tensor([[5.0, 1.0, 1.0, 1.0, 0.0]])
    for filters in (
        CandidateFilters(torch.tensor([2]), None, None),
        CandidateFilters(None, torch.tensor([0.97]), None),
    ):
        assert kept_by(filters, logits).tolist() == [[True] * 4 + [False]]


def flat(generator: torch.Generator) -> torch.Tensor:
    """Return rows of 200 ids: peaked, flat, of few values, and with few possible ids."""
    spread = torch.tensor([8.0, 0.01, 1.0, 4.0]).repeat(5)
    logits = torch.randn(20, 200, generator=generator) * spread[:, None]
    logits[2::4] = logits[2::4].round()
    logits[3::4, 3:] = float("-inf")
    return logits


@pytest.mark.parametrize("names", ["k", "p", "kp", "kpm"])
@pytest.mark.parametrize("borders", [[], [52], [148, 188]], ids=str)
def test_the_likeliest_ids_give_the_thresholds_of_the_search(monkeypatch, names, borders):
    """Ties, a top-k above 64, a mass that 64 ids do not hold and rows without a filter have the
    thresholds that the search of whole rows has, on every rank, and only such rows are searched.
    """
    generator = torch.Generator().manual_seed(0)
    logits, ones, searched = flat(generator), torch.ones(20), []
    top_k = torch.tensor([1, 64, 65, 200, 20]).repeat(4)
    top_p = torch.tensor([1.0, 0.999, 0.5, 0.9]).repeat_interleave(5)
    filters = CandidateFilters(
        top_k if "k" in names else None,
        top_p if "p" in names else None,
        torch.full((20,), 0.01) if "m" in names else None,
    )
    right = candidate_filters.largest_key

    def recorded(weigh, wanted, maximum, active):
        searched.append(len(wanted))
        return right(weigh, wanted, maximum, active)

    def keys(head: OutputHead) -> torch.Tensor:
        own = logits[:, head.first_id : head.first_id + len(head.weight)]
        return thresholds(RowLogits(own, head.first_id), ones, logits.amax(-1), filters, 200, head)

    monkeypatch.setattr(candidate_filters, "largest_key", recorded)
    results = on_shards(torch.eye(200), borders, None, keys)
    assert all(num_rows < 20 for num_rows in searched)
    assert searched
    # As if no row were settled.
    monkeypatch.setattr(
        candidate_filters._Likeliest,
        "largest_key",
        lambda self, by_mass, wanted: (wanted, torch.zeros_like(wanted, dtype=torch.bool)),
    )
    (expected,) = on_shards(torch.eye(200), [], None, keys)
    for result in results:
        assert torch.equal(result, expected)


def test_usual_filters_search_no_row(monkeypatch):
    """No row is searched where 64 ids hold what the filters keep."""
    monkeypatch.setattr(candidate_filters, "largest_key", None)
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(0)) * 8
    kept = kept_by(CandidateFilters(torch.full((8,), 20), torch.full((8,), 0.9), None), logits)
    assert 1 <= kept.sum(-1).min() <= kept.sum(-1).max() <= 20


ROWS, VOCAB = 6, 40


def sampled(
    head: OutputHead,
    logits: torch.Tensor,
    adjustments: LogitAdjustments | None = None,
    tile_size: int | None = None,
) -> PositionStatistics:
    """Sample rows with three choices each, at several temperatures."""
    zeros = torch.zeros(ROWS, dtype=torch.int32)
    temperature = torch.linspace(0.5, 2.0, ROWS)
    draws = RowDraws(temperature, torch.zeros(ROWS), zeros.long(), zeros, zeros, zeros)
    return sample_rows(head, logits, draws, adjustments, 3, tile_size)


def logits_with_ties() -> torch.Tensor:
    """Return logits [ROWS, VOCAB] with few different values."""
    return torch.randint(0, 5, (ROWS, VOCAB), generator=torch.Generator().manual_seed(0)).float()


@pytest.mark.parametrize("tile_size", [4, 16, 4096])
@pytest.mark.parametrize("borders", [[], [4], [8, 24]], ids=str)
def test_likeliest_first_and_lower_ids_of_equals(tile_size, borders):
    """On every rank, choices are ordered by logit, and lower ids come first among equal ones."""
    logits = logits_with_ties()
    expected = logits.sort(dim=-1, descending=True, stable=True).indices[:, :3]
    results = on_shards(
        torch.eye(VOCAB), borders, None, lambda head: sampled(head, logits, tile_size=tile_size)
    )
    for result in results:
        assert torch.equal(result.choices, expected)
        assert torch.equal(result.argmax, expected[:, 0])


def test_what_a_request_forbids_is_no_choice():
    """A row with fewer possible ids than choices repeats the last of them."""
    penalties = fake_penalties(ROWS, VOCAB, np.random.default_rng(0))
    requests = row_adjustments(penalties, VOCAB)
    for slot, allowed in enumerate(((7,), (9, 30))):
        requests.add_request(slot, sampling_params(), allowed)
    adjustments = bind(requests, [1] * ROWS)
    logits = logits_with_ties()
    logits[1, 30] = 9.0
    choices = sampled(identity_head(VOCAB), logits, adjustments).choices
    assert choices[:2].tolist() == [[7, 7, 7], [30, 9, 9]]


def test_nobody_asks():
    """No choices are computed for a rule that reads only the likeliest token."""
    logits = logits_with_ties()
    assert sample_rows(identity_head(VOCAB), logits, row_draws(ROWS), None, 0).choices is None
