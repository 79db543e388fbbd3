"""Argmax, entropy and candidates of rows of logits."""

from __future__ import annotations

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
