"""Tests of the parts that the published loops share, and of the tiny models, worked out by hand."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.families.llada2_model import Gate


def _gate(**config: int) -> Gate:
    return Gate(SimpleNamespace(hidden_size=1, routed_scaling_factor=2.5, **config))


def test_gate() -> None:
    """The bias chooses groups and experts, and the weights are the normalized, scaled plain scores.

    Of two groups of two experts, one group and one of its experts are chosen. By hand: group 1 has
    the best sum only with its bias, and in it expert 2 the best biased score.
    """
    gate = _gate(n_group=2, topk_group=1, num_experts=4, num_experts_per_tok=2)
    scores = torch.tensor([0.9, 0.8, 0.5, 0.4])
    gate.weight.data = torch.logit(scores)[:, None]
    gate.expert_bias = torch.tensor([0.0, 0.0, 0.6, 0.5])
    chosen, weights = gate(torch.ones(1, 1))
    assert chosen.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.4]]) / 0.9 * 2.5)


def test_gate_per_block() -> None:
    """A block's experts are the best of any of its tokens, and each token chooses among them.

    Token 0 prefers experts 0 and 1, and token 1 prefers expert 2 above all. With room for two,
    expert 2 and expert 0 are in, so token 0 takes 0 and then 2, not 1.
    """
    sizes = {"n_group": 2, "topk_group": 1, "num_experts": 3, "num_experts_per_tok": 2}
    gate = _gate(**sizes, expert_capacity=2, block_size=2)
    scores = torch.tensor([[0.8, 0.7, 0.1], [0.2, 0.3, 0.9]])
    gate.weight.data = torch.logit(scores).T
    chosen, weights = gate(torch.eye(2))
    assert chosen.tolist() == [[0, 2], [2, 0]]
    torch.testing.assert_close(weights[0], torch.tensor([0.8, 0.1]) / 0.9 * 2.5)
    with pytest.raises(ValueError, match="no whole number"):
        gate(torch.eye(2)[:1])
