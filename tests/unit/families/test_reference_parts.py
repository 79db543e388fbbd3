"""What the published loops share, worked out by hand, and the tiny models that they run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.families import model, run, scripts
from tests.support.families.cases import CASES, Wanted, expected
from tests.support.families.llada2_model import DELETE_ID, SPLIT_ID, Gate
from tests.support.families.model import MASK_ID, prompt_of


@pytest.mark.parametrize(
    ("loop", "name", "prompt_length", "num_at_once", "num_masks", "is_strict"),
    [
        (scripts.sdar_loop, "confidence_threshold", 0, 1, 8, True),
        (scripts.llada2_0_loop, "threshold", 0, 1, 8, True),
        # Two sub-blocks, and then two blocks.
        (scripts.fast_dllm_loop, "threshold", 1, 2, 7, True),
        (scripts.stable_diffcoder_loop, "threshold", 0, 2, 8, False),
        # A seed, and the rest of its block.
        (scripts.nemotron_loop, "threshold", 1, 1, 7, False),
    ],
)
def test_threshold(loop, name, prompt_length, num_at_once, num_masks, is_strict):
    """A probability of exactly the threshold is above it, or not; below it the best mask goes alone."""
    even = scripts.constant([scripts.row(10, 0.5, second=11)] * 9)
    for threshold, is_above in ((0.49, True), (0.5, not is_strict), (0.51, False)):
        result = loop(even, prompt_ids=[30] * prompt_length, **{name: threshold})
        assert result.count("denoise") == (num_at_once if is_above else num_masks)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("prompt_length", [1, 4, 7])
def test_random_weights(name, prompt_length):
    """Whatever a model says, blocks end, without masks; in as many steps where nothing is edited."""
    case, tiny = CASES[name], CASES[name].make()
    B = tiny.block_length
    wanted = Wanted(B + 5, temperature=0.7, editing_threshold=0.3, max_post_steps=4)
    result = expected(case, tiny, prompt_of(prompt_length), wanted)
    assert len(result.tokens) == B + 5
    assert MASK_ID not in result.tokens
    if name == "llada2.2":
        assert not {DELETE_ID, SPLIT_ID} & set(result.tokens)
    elif name != "llada2.1":
        assert max(scripts.blocks(result, "denoise")) <= B


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
