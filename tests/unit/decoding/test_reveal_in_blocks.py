"""Tests of the blocks in which a whole sequence is revealed."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.specs import step_inputs, without_unread
from vllm_diffusion.decoding.reveal_in_blocks import RevealInBlocks

MASK = 4


@given(
    num_known=st.integers(0, 9),
    num_emitted=st.integers(0, 2),
    block_length=st.integers(1, 6),
    strategy=st.sampled_from(RevealInBlocks.settings["strategy"].words),
    data=st.data(),
)
def test_only_the_first_block_is_revealed(
    num_known: int, num_emitted: int, block_length: int, strategy: str, data: st.DataObject
) -> None:
    """Positions after the first block stay masked, are not emitted, and are not read."""
    length = num_known + 3 * block_length
    num_given = num_known + num_emitted * block_length
    end = num_given + block_length
    position = torch.arange(length)[None]
    canvas = torch.where(position < num_given, 7, MASK)
    revealed = data.draw(st.lists(st.booleans(), min_size=block_length, max_size=block_length))
    canvas[0, num_given:end] = torch.where(torch.tensor(revealed), 8, MASK)
    rule = RevealInBlocks(MASK, spreads_masks=True)
    settings = {
        name: torch.tensor([rule.settings[name].number(value)])
        for name, value in {
            "strategy": strategy,
            "reveal_threshold": 0.5,
            "entropy_budget": 0.1,
            "block_length": block_length,
        }.items()
    }
    inputs = step_inputs(
        canvas=canvas,
        candidate=torch.full_like(canvas, 9),
        drawn_confidence=torch.rand(1, length),
        entropy=torch.rand(1, length),
        fixed=position < num_given,
        known=position < num_given,
        uniform=torch.rand(1, length),
    )
    decision = rule.decide(inputs, settings, {})
    of_the_rest = rule.decide(without_unread(rule, inputs, settings), settings, {})
    for field in ("keep", "tokens", "result", "done", "num_final"):
        assert torch.equal(getattr(decision, field), getattr(of_the_rest, field))
    after = torch.where(decision.keep, decision.tokens, MASK)
    assert decision.num_final is not None
    assert int(decision.num_final) == end
    assert (after[0, end:] == MASK).all()
    assert torch.equal(after[0, :num_given], canvas[0, :num_given])
    block = after[0, num_given:end]
    assert bool(decision.done) == bool((block != MASK).all())
    # At least one more, and what was revealed stays.
    assert all(bool(block[i] == 8) for i in range(block_length) if revealed[i])
    assert all(revealed) or int((block == 9).sum()) > 0
