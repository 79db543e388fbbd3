"""Argmax, entropy and candidates of rows of logits."""

from __future__ import annotations

import math

import pytest
import torch

from attention_kernels.testing import assert_within_error_budget
from vllm_diffusion.sampling.row_statistics import (
    CandidateFilters,
    apply_filters,
    row_statistics,
)


def statistics(logits: torch.Tensor, temperature: float = 1.0, filters=None):
    rows = logits.shape[0]
    return row_statistics(
        logits,
        torch.full((rows,), temperature),
        torch.arange(rows),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        filters,
    )


def test_entropy_against_float64():
    """Entropy in nats as close to fp64 as plain PyTorch."""
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * 8
    exact = torch.distributions.Categorical(logits=logits.double()).entropy()
    plain = torch.distributions.Categorical(logits=logits).entropy()
    assert_within_error_budget(statistics(logits).entropy, plain, exact, "entropy")


def test_masked_tokens_are_never_drawn_and_add_no_entropy():
    """Minus infinity is a probability of zero, not a NaN."""
    logits = torch.randn(200, 50, generator=torch.Generator().manual_seed(1))
    logits[:, 10:] = float("-inf")
    result = statistics(logits)
    assert torch.isfinite(result.entropy).all()
    assert int(result.candidate.max()) < 10
    assert int(result.argmax.max()) < 10


def test_temperature_zero_draws_the_argmax():
    logits = torch.randn(100, 50, generator=torch.Generator().manual_seed(2))
    result = statistics(logits, temperature=0.0)
    assert torch.equal(result.candidate, result.argmax)


def test_temperature_moves_candidates_only():
    """Entropy, confidence and argmax keep the schedule's temperature."""
    logits = torch.randn(100, 50, generator=torch.Generator().manual_seed(3))
    one, two = statistics(logits, 1.0), statistics(logits, 2.0)
    assert torch.equal(one.entropy, two.entropy)
    assert torch.equal(one.confidence, two.confidence)
    assert torch.equal(one.argmax, two.argmax)
    assert not torch.equal(one.candidate, two.candidate)


def test_filters_keep_what_vllm_keeps():
    """Top-k and top-p of each row against vLLM's own PyTorch implementation; min-p by definition."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    rows, vocab = 60, 40
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    top_k = torch.randint(1, vocab + 1, (rows,), generator=generator)
    top_p = torch.rand(rows, generator=generator).clamp(min=0.05)
    ours = apply_filters(logits, CandidateFilters(top_k, top_p, torch.zeros(rows)))
    stock = apply_top_k_top_p_pytorch(logits.clone(), top_k, top_p)
    assert torch.equal(ours, stock)

    min_p = torch.rand(rows, generator=generator)
    off_k, off_p = torch.full((rows,), vocab), torch.ones(rows)
    ours = apply_filters(logits, CandidateFilters(off_k, off_p, min_p))
    probs = logits.softmax(-1)
    kept = probs >= min_p[:, None] * probs.max(-1, keepdim=True).values
    assert torch.equal(ours > float("-inf"), kept)


@pytest.mark.parametrize(
    "settings",
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
def test_candidates_follow_the_exact_distribution(settings):
    """Chi-square over 20,000 seeds with the logits held fixed, against the definition in float64."""
    rows, vocab = 20_000, 16
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(8)) * 1.5
    for token, bias in settings.get("bias", {}).items():
        logits[token] += bias
    temperature = settings.get("temperature", 1.0)
    top_k, top_p = settings.get("top_k", vocab), settings.get("top_p", 1.0)
    min_p = settings.get("min_p", 0.0)

    probs = (logits.double() / temperature).softmax(-1)
    probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    probs = torch.where(probs >= probs.topk(top_k).values[-1], probs, 0.0)
    probs /= probs.sum()
    ordered, order = probs.sort(descending=True)
    # The smallest set of likeliest tokens that reaches p.
    kept = order[ordered.cumsum(-1) - ordered < top_p]
    expected = torch.zeros(vocab, dtype=torch.float64)
    expected[kept] = probs[kept] / probs[kept].sum()

    same = torch.ones(rows, dtype=torch.int64)
    drawn = row_statistics(
        logits.expand(rows, -1),
        torch.full((rows,), temperature),
        torch.arange(rows) * 7919,
        same,
        same,
        same,
        CandidateFilters(same * top_k, torch.full((rows,), top_p), torch.full((rows,), min_p)),
    ).candidate
    counts = torch.bincount(drawn, minlength=vocab).double()
    assert counts[expected == 0].sum() == 0
    possible = expected > 0
    freedom = int(possible.sum()) - 1
    deviation = (counts - rows * expected)[possible] ** 2 / (rows * expected[possible])
    assert abs(deviation.sum().item() - freedom) < 5 * math.sqrt(2 * max(freedom, 1))
