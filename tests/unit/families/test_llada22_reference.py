"""LLaDA2.2's loop does what the publisher's does: small cases worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.families import llada2
from tests.support.families.model import scripted
from tests.support.families.scripts import (
    DELETE,
    END,
    MASK,
    SPLIT,
    blocks,
    constant,
    llada2_2_loop,
    row,
)


@pytest.mark.parametrize(
    ("written", "expected", "marks"),
    [
        ([10, DELETE, 12, 13], [10, 12, 13, MASK], [0, 1, 0, 0]),
        ([10, SPLIT, 12, 13], [10, MASK, 21, 12], [0, 0, 0, 1]),
        ([DELETE, 11, SPLIT, 13], [11, MASK, 22, 13], [0, 0, 1, 0]),
        ([10, 11, 12, 13], [10, 11, 12, 13], [0, 0, 1, 0]),
        ([DELETE] * 4, [MASK] * 4, [0, 0, 0, 0]),
        ([SPLIT] * 4, [MASK, 20, MASK, 21], [0, 0, 0, 0]),
    ],
)
def test_apply_edits(written, expected, marks):
    """DELETE shifts left and fills up; SPLIT restores the old token behind a new mask."""
    tokens, original = llada2.apply_edits(
        written,
        [20, 21, 22, 23],
        [False, False, True, False],
        0,
        mask_id=MASK,
        delete_token_id=DELETE,
        split_token_id=SPLIT,
    )
    assert tokens == expected
    assert original == [bool(mark) for mark in marks]


def test_apply_edits_leaves_the_prompt():
    """Also where it holds the ids themselves."""
    tokens, _ = llada2.apply_edits(
        [DELETE, SPLIT, DELETE, 13],
        [DELETE, SPLIT, 22, 23],
        [False, False, True, True],
        2,
        mask_id=MASK,
        delete_token_id=DELETE,
        split_token_id=SPLIT,
    )
    assert tokens == [DELETE, SPLIT, 13, MASK]


def test_final_round():
    """A first token that always wants to be deleted: the last post step takes its second choice."""

    def script(ids: Sequence[int]) -> Tensor:
        rows = [row(10 + i, 0.95) for i in range(4)]
        if ids[-1] != MASK:
            rows[0] = row(DELETE, 0.9, second=30)
        return torch.stack(rows)

    result = llada2_2_loop(scripted(script), max_post_steps=3)
    assert DELETE not in result.tokens
    assert MASK not in result.tokens
    assert result.tokens[0] == 30
    # Filled, three rounds without first masks of which the last is final, and no more.
    assert result.count("denoise") <= 1 + 2 * 3


def test_anti_loop():
    """A result that was seen before is left by the least certain change's second choice."""

    def script(ids: Sequence[int]) -> Tensor:
        # The first token swings between 10 and 11; 12 is the second choice in the swing back.
        if ids[-1] == MASK:
            return torch.stack([row(10, 0.95)] * 4)
        swing = {10: row(11, 0.7, second=13), 11: row(10, 0.6, second=12)}
        first = swing.get(ids[-4], row(ids[-4], 0.95))
        return torch.stack([first] + [row(10, 0.95)] * 3)

    result = llada2_2_loop(scripted(script))
    assert result.tokens == [12, 10, 10, 10]
    # Filled with 10; 11; back to 10, which was seen: 12; then nothing changes.
    assert result.count("denoise") == 4


def test_escape_is_injected():
    """The position that is drawn again is the caller's choice; the publisher's is random."""
    asked: list[tuple[int, ...]] = []

    def escape(before: Tensor, after: Tensor, confidence: Tensor) -> int:
        asked.append(tuple((before != after).nonzero()[:, 0].tolist()))
        return asked[-1][-1]

    def script(ids: Sequence[int]) -> Tensor:
        if ids[-1] == MASK:
            return torch.stack([row(10, 0.95)] * 4)
        rows = [row(10, 0.95)] * 4
        for i in (0, 1):
            there = ids[len(ids) - 4 + i]
            rows[i] = {10: row(11, 0.7, second=13), 11: row(10, 0.6, second=12)}.get(
                there, row(there, 0.95)
            )
        return torch.stack(rows)

    result = llada2_2_loop(scripted(script), escape=escape, max_post_steps=8)
    assert asked[0] == (0, 1)
    assert result.tokens[1] == 12


@pytest.mark.parametrize("early", [False, True])
def test_end_tokens(early):
    """Any of the ids ends what is returned."""
    said = constant([row(token, 0.95) for token in [10, 11, 7, 13] * 2])
    result = llada2_2_loop(said, gen_length=8, eos_ids=(END, 7), eos_early_stop=early)
    assert result.tokens == [10, 11, 7]
    assert len(blocks(result, "denoise")) == (1 if early else 2)
