"""The schedule in time, against a loop over its steps, and the blocks of a whole sequence."""

from __future__ import annotations

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.specs import step_inputs
from vllm_diffusion.decoding.reveal_in_blocks import RevealInBlocks
from vllm_diffusion.decoding.timed_reveal import ALGORITHMS, TimedReveal

MASK = 4


@given(
    num_masks=st.integers(1, 300),
    num_steps=st.integers(1, 600),
    num_known=st.integers(0, 5),
    eps=st.sampled_from([1e-3, 0.1]),
)
def test_the_number_of_masks_of_each_step(
    num_masks: int, num_steps: int, num_known: int, eps: float
) -> None:
    """Those that are above 0, one after another: no pass is run for the others."""
    times = torch.linspace(1, eps, num_steps + 1)
    expected, left = [], num_masks
    for step in range(num_steps):
        share = left * (1 - times[step + 1] / times[step])
        # Where rounding decides, another order of the same operations may differ.
        assume(step == num_steps - 1 or abs(float(share) - round(float(share))) > 1e-3)
        number = left if step == num_steps - 1 else int(share)
        if number:
            expected.append(number)
            left -= number

    rule = TimedReveal(MASK)
    length = num_known + num_masks
    canvas = torch.full((1, length), MASK)
    fixed = torch.arange(length)[None] < num_known
    settings = {
        "algorithm": torch.tensor([ALGORITHMS.index("maskgit_plus")], dtype=torch.int32),
        "eps": torch.tensor([eps]),
        "alg_temp": torch.zeros(1),
    }
    memory = {"time": torch.zeros(1, dtype=torch.int32)}
    found = []
    is_done = False
    while not is_done:
        inputs = step_inputs(
            canvas=canvas,
            candidate=torch.full_like(canvas, 9),
            drawn_confidence=torch.rand(1, length),
            fixed=fixed,
            max_steps=torch.tensor([num_steps], dtype=torch.int32),
            uniform=torch.full((1, length), 0.5),
            margin=torch.zeros(1, length),
        )
        decision = rule.decide(inputs, settings, memory)
        after = torch.where(decision.keep, decision.tokens, MASK)
        found.append(int((after != canvas).sum()))
        canvas, memory, is_done = after, dict(decision.memory), bool(decision.done)
    assert found == expected


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
    """What stands after it stays masked, and is no part of what is emitted."""
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
        uniform=torch.rand(1, length),
    )
    decision = rule.decide(inputs, settings, {})
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
