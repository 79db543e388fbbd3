"""Tests of LLaDA2.2's experts by block against the gate of the published PyTorch code."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.families.llada2_model import Gate

pytestmark = pytest.mark.engine

BLOCK, EXPERTS, TOP_K, CAPACITY = 8, 16, 4, 6


def gate_and_router():
    """The published gate with random weights, and ours with the same bias."""
    from vllm_diffusion.families.llada2.model import BlockRouter

    gate = Gate(
        SimpleNamespace(
            num_experts=EXPERTS,
            hidden_size=EXPERTS,
            num_experts_per_tok=TOP_K,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            expert_capacity=CAPACITY,
            block_size=BLOCK,
        )
    )
    # Its inputs are the logits.
    gate.weight.data = torch.eye(EXPERTS)
    gate.expert_bias = 0.3 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(1))
    router = BlockRouter(
        TOP_K,
        EXPERTS,
        capacity=CAPACITY,
        block_length=BLOCK,
        bias=gate.expert_bias,
        scaling_factor=2.5,
    )
    return gate, router


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
def test_the_published_gate(num_blocks):
    """The router chooses the published gate's experts with the same weights."""
    gate, router = gate_and_router()
    logits = torch.randn(num_blocks * BLOCK, EXPERTS, generator=torch.Generator().manual_seed(2))
    weights, chosen = router.select_experts(hidden_states=logits, router_logits=logits)
    expected, expected_weights = gate(logits)
    order, expected_order = chosen.argsort(-1), expected.argsort(-1)
    assert torch.equal(chosen.gather(-1, order), expected.gather(-1, expected_order).int())
    torch.testing.assert_close(
        weights.gather(-1, order), expected_weights.gather(-1, expected_order)
    )
    alone = (logits.sigmoid() + gate.expert_bias).topk(TOP_K).indices
    assert not torch.equal(alone.sort(-1).values, expected.sort(-1).values)
    for block in chosen.view(num_blocks, -1):
        assert len(block.unique()) <= CAPACITY


@pytest.mark.parametrize("num_padding", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 2])
def test_padding_changes_nothing(num_padding):
    """Padded rows after the last request's rows change nothing, whatever they hold."""
    _, router = gate_and_router()
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2 * BLOCK, EXPERTS, generator=generator)
    padding = 50 * torch.randn(num_padding, EXPERTS, generator=generator)
    alone = router.select_experts(hidden_states=logits, router_logits=logits)
    padded = torch.cat([logits, padding])
    weights, chosen = router.select_experts(hidden_states=padded, router_logits=padded)
    assert len(chosen) == len(padded)
    assert torch.equal(weights[: 2 * BLOCK], alone[0])
    assert torch.equal(chosen[: 2 * BLOCK], alone[1])


def test_no_kernel_routes_by_itself():
    """The router makes vLLM choose a kernel that does not route by itself."""
    _, router = gate_and_router()
    assert not router.supports_monolithic_kernels
