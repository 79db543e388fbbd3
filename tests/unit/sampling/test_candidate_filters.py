"""What top-k, top-p and min-p keep of a row."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.vocab_statistics import RowLogits, ordered_keys
from tests.support.heads import output_head
from vllm_diffusion.sampling.row_settings import CandidateFilters, thresholds


def kept_by(filters: CandidateFilters, logits: torch.Tensor) -> torch.Tensor:
    """[num_rows, vocab_size], bool."""
    rows, ones = RowLogits(logits, 0), torch.ones(len(logits))
    keys = thresholds(rows, ones, logits.amax(-1), filters, logits.shape[1], output_head(logits))
    return ordered_keys(logits) >= keys[:, None]


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 20),
    vocab=st.integers(1, 60),
    seed=st.integers(0, 2**31),
)
def test_filters_keep_what_vllm_keeps(rows, vocab, seed):
    """Top-k and top-p of each row against vLLM's own PyTorch implementation; min-p by definition."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 3
    top_k = torch.randint(1, vocab + 1, (rows,), generator=generator)
    top_p = torch.rand(rows, generator=generator).clamp(min=0.05)
    min_p = torch.rand(rows, generator=generator)

    def kept(filters: CandidateFilters) -> torch.Tensor:
        return kept_by(filters, logits)

    stock = apply_top_k_top_p_pytorch(logits.clone(), top_k, top_p)
    assert torch.equal(kept(CandidateFilters(top_k, top_p, None)), stock > float("-inf"))
    probs = logits.double().softmax(-1)
    floor = min_p[:, None] * probs.amax(-1, keepdim=True)
    # Where a probability is the floor up to rounding, either is right.
    decided = (probs - floor).abs() > 1e-6 * floor
    ours = kept(CandidateFilters(None, None, min_p))
    assert torch.equal(ours & decided, (probs >= floor) & decided)


def test_ties_with_the_last_token_kept_are_kept():
    logits = torch.tensor([[5.0, 1.0, 1.0, 1.0, 0.0]])
    for filters in (
        CandidateFilters(torch.tensor([2]), None, None),
        CandidateFilters(None, torch.tensor([0.97]), None),
    ):
        assert kept_by(filters, logits).tolist() == [[True] * 4 + [False]]
