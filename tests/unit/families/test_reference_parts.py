"""What the reference loops share, worked out by hand."""

from __future__ import annotations

import pytest
import torch

from tests.support.families import run


@pytest.mark.parametrize(
    ("num_masked", "steps", "expected"),
    [(8, 3, [3, 3, 2]), (4, 4, [1] * 4), (3, 5, [1, 1, 1, 0, 0]), (0, 2, [0, 0])],
)
def test_even_schedule(num_masked, steps, expected):
    """Larger numbers come first, and all masks are spent."""
    assert run.even_schedule(num_masked, steps) == expected


def test_most_confident():
    """Candidates only, never more than there are, the leftmost of equals first."""
    confidence = torch.tensor([0.9, 0.5, 0.5, 0.7])
    candidates = torch.tensor([False, True, True, True])
    chosen = run.most_confident(confidence, candidates, 2)
    assert chosen.tolist() == [False, True, False, True]
    assert run.most_confident(confidence, candidates, 9).tolist() == candidates.tolist()
    assert not run.most_confident(confidence, candidates, 0).any()


def test_filtered():
    """Top-k keeps ties with the last one; top-p the token with which its sum is passed."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[None]
    assert run.filtered(logits, 2, 1.0).isfinite().tolist() == [[True, True, False, False]]
    assert run.filtered(logits, 0, 0.5).isfinite().tolist() == [[True, True, False, False]]
    assert run.filtered(logits, 0, 0.3).isfinite().tolist() == [[True, False, False, False]]
    tied = torch.tensor([[1.0, 1.0, 0.0]])
    assert run.filtered(tied, 1, 1.0).isfinite().tolist() == [[True, True, False]]


def test_block_causal():
    """Blocks are counted from position 0, also where the sequence ends inside one."""
    visible = run.block_causal(5, 2).int().tolist()
    assert visible == [
        [1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]
    assert run.causal_then_block(1, 2).int().tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 1]]


def test_keyed_sample():
    """A draw depends on its key, and on no other row; over keys it follows the law."""
    sample = run.keyed_sample(7)
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(3000, 3)
    draws = run.block_draws(0, 0, range(3000))
    tokens = sample(logits, draws)
    alone = sample(logits[:1], run.block_draws(0, 0, [17]))
    assert int(alone) == int(tokens[17])
    counts = tokens.bincount(minlength=3) / 3000
    assert (counts - torch.tensor([0.5, 0.3, 0.2])).abs().max() < 0.03
