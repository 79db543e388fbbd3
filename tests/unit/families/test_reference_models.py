"""The tiny models: what each of their rows sees, and what their experts and adapters are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.families import model, run
from tests.support.families.cases import CASES
from tests.support.families.llada2_model import Gate
from tests.support.families.model import MASK_ID, prompt_of


@pytest.mark.parametrize("name", CASES)
def test_logits(name: str) -> None:
    """They differ from mask to mask, and under a block-causal mask no row sees a later block.

    So that a finished block's keys and values are final, and recomputing is caching.
    """
    tiny = CASES[name].make()
    ids = torch.tensor(prompt_of(40) + [MASK_ID] * 24)
    visible = run.block_causal(64, 32)
    before = tiny(ids, visible)
    assert len(set(before[40:].argmax(-1).tolist())) > 8
    ids[35] = 25 if ids[35] != 25 else 26
    after = tiny(ids, visible)
    torch.testing.assert_close(after[:32], before[:32], rtol=0, atol=1e-5)
    assert ((after - before).abs().amax(-1) > 1e-4)[32:].all()


def test_query_scaling() -> None:
    """Nemotron's queries grow with the position, from the original length on."""
    tiny = model.nemotron()
    ids = torch.tensor(prompt_of(40))
    logits = tiny(ids, run.causal(40))
    tiny.body.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    plain = tiny(ids, run.causal(40))
    torch.testing.assert_close(plain[:16], logits[:16], rtol=0, atol=1e-5)
    assert ((plain - logits).abs().amax(-1) > 1e-4)[16:].all()


def test_lora_rows() -> None:
    """The LoRA acts on the rows that ask for it, and no context row sees it."""
    tiny = model.nemotron()
    ids = torch.tensor(prompt_of(12))
    visible = run.causal_then_block(8, 4)
    plain = tiny(ids, visible)
    adapted = tiny(ids, visible, adapted=torch.arange(12) >= 8)
    torch.testing.assert_close(adapted[:8], plain[:8], rtol=0, atol=1e-5)
    assert ((adapted - plain).abs().amax(-1) > 1e-2)[8:].all()
    assert torch.equal(tiny(ids, visible), plain)


def _gate(**config: int) -> Gate:
    return Gate(SimpleNamespace(hidden_size=1, routed_scaling_factor=2.5, **config))


def test_gate() -> None:
    """The bias chooses groups and experts; the weights are the plain scores, normalised, scaled.

    Two groups of two experts, one group and one expert of it taken... by hand: group 1 has the
    best sum only with its bias, and in it expert 2 the best biased score.
    """
    gate = _gate(n_group=2, topk_group=1, num_experts=4, num_experts_per_tok=2)
    scores = torch.tensor([0.9, 0.8, 0.5, 0.4])
    gate.weight.data = torch.logit(scores)[:, None]
    gate.expert_bias = torch.tensor([0.0, 0.0, 0.6, 0.5])
    chosen, weights = gate(torch.ones(1, 1))
    assert chosen.tolist() == [[2, 3]]
    torch.testing.assert_close(weights, torch.tensor([[0.5, 0.4]]) / 0.9 * 2.5)


def test_gate_per_block() -> None:
    """A block's experts are the best of any of its tokens; each token chooses among them.

    Token 0 likes experts 0 and 1, token 1 expert 2 most of all: with room for two, expert 2 and
    expert 0 are in, so token 0 takes 0 and then 2, not 1.
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
