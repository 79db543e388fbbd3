"""LLaDA2.0's and 2.1's loops do what the publisher's do: small cases worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.families.model import scripted
from tests.support.families.scripts import (
    END,
    MASK,
    blocks,
    constant,
    decreasing,
    llada2_0_loop,
    llada2_1_loop,
    row,
)


def test_steps():
    """Fewer steps reveal more each; ``minimal_topk`` and a short generation make them fewer."""
    result = llada2_0_loop(decreasing(8), threshold=1.0, steps=2)
    assert result.revealed == [0] * 4 + [1] * 4
    result = llada2_0_loop(decreasing(8), threshold=1.0, minimal_topk=4)
    assert result.count("denoise") == 2


def test_commit():
    """With a cache a finished block is forwarded once more, but not the last one."""
    result = llada2_0_loop(decreasing(24, by=0.02), gen_length=24, threshold=0.0)
    assert [one.kind for one in result.passes] == ["denoise", "commit"] * 2 + ["denoise"]


@pytest.mark.parametrize(
    ("early", "p", "steps"), [(False, 0.85, 8), (True, 0.85, 2), (True, 0.99, 8)]
)
def test_end_token_of_2_0(early, p, steps):
    """Early, in the step that reveals it, if nothing masked stands before it; else when full.

    One that was revealed before what stands before it waits for its block.
    """
    rows = [row(10 + i, 0.9 - 0.05 * i) for i in range(16)]
    rows[1] = row(END, p)
    result = llada2_0_loop(constant(rows), gen_length=16, threshold=0.95, eos_early_stop=early)
    assert result.tokens == [10, END]
    assert result.count("denoise") == steps


def test_end_token_in_the_prompt():
    """A chat's earlier turns end nothing."""
    result = llada2_0_loop(
        decreasing(16), prompt_ids=[30, END, 31], gen_length=5, threshold=0.0, eos_early_stop=True
    )
    assert result.tokens == [13, 14, 15, 16, 17]


def test_gen_length():
    """The last block is denoised whole and cut."""
    result = llada2_0_loop(decreasing(16), prompt_ids=[30] * 3, gen_length=7, threshold=0.0)
    assert len(result.tokens) == 7
    assert result.passes[-1].num_masked == 8


def test_ends_with_a_step_that_changes_nothing():
    """That step ran on the final tokens: its KV is final, and no pass commits."""
    result = llada2_1_loop(
        constant([row(10, 0.9)] * 12), gen_length=12, threshold=0.5, editing_threshold=0.5
    )
    assert [(one.kind, one.num_masked) for one in result.passes] == [
        ("denoise", 4),
        ("denoise", 0),
    ] * 3


def test_at_least_one_a_step():
    """Below the threshold, the best one."""
    result = llada2_1_loop(decreasing(4), threshold=0.95, editing_threshold=0.9)
    assert result.revealed == [0, 1, 2, 3]
    assert result.count("denoise") == 5


@pytest.mark.parametrize(
    ("editing_threshold", "expected"), [(0.0, 20), (0.19, 20), (0.21, 10), (0.9, 10)]
)
def test_editing(editing_threshold, expected):
    """A decided token gives way to a likelier one above the threshold; one of 0 edits too."""

    def script(ids: Sequence[int]) -> Tensor:
        first = row(10, 0.9) if MASK in ids else row(20, 0.2)
        return torch.stack([first] + [row(11, 0.9)] * (len(ids) - 1))

    result = llada2_1_loop(scripted(script), threshold=0.5, editing_threshold=editing_threshold)
    assert result.tokens == [expected, 11, 11, 11]
    assert result.rewritten == (expected == 20)
    assert result.count("denoise") == (3 if expected == 20 else 2)


def test_editing_threshold_is_strict():
    """Exactly the threshold does not edit."""

    def script(ids: Sequence[int]) -> Tensor:
        said = row(10, 0.9) if MASK in ids else row(20, 0.5, second=21)
        return torch.stack([said] * len(ids))

    kept = llada2_1_loop(scripted(script), threshold=0.5, editing_threshold=0.5)
    assert kept.tokens == [10] * 4
    edited = llada2_1_loop(scripted(script), threshold=0.5, editing_threshold=0.49)
    assert edited.tokens == [20] * 4


def test_prompt_is_not_edited():
    """The prompt's remainder stands in the first block, and stays."""
    seen: list[list[int]] = []

    def script(ids: Sequence[int]) -> Tensor:
        seen.append(list(ids))
        return torch.stack([row(20, 0.9)] * len(ids))

    result = llada2_1_loop(
        scripted(script), prompt_ids=[30, 31], gen_length=2, editing_threshold=0.0
    )
    assert result.tokens == [20, 20]
    assert seen[-1] == [30, 31, 20, 20]


def test_post_steps_bound_the_block():
    """A token that never settles: so many steps without masks, and then a commit."""

    def script(ids: Sequence[int]) -> Tensor:
        return torch.stack([row(10 if token != 10 else 11, 0.9) for token in ids])

    result = llada2_1_loop(
        scripted(script),
        gen_length=8,
        threshold=0.5,
        editing_threshold=0.0,
        max_post_steps=3,
    )
    kinds = [one.kind for one in result.passes]
    assert kinds == ["denoise"] * 4 + ["commit"] + ["denoise"] * 4
    # Written as 10, then 11, 10 and 11 again.
    assert result.tokens == [11] * 8


@pytest.mark.parametrize("early", [False, True])
def test_end_token_of_2_1(early):
    """Early, after its block; otherwise generation goes on. What is returned is the same."""
    rows = [row(10, 0.9)] * 12
    rows[2] = row(END, 0.9)
    result = llada2_1_loop(constant(rows), gen_length=12, threshold=0.5, eos_early_stop=early)
    assert result.tokens == [10, 10, END]
    assert blocks(result, "denoise") == ([2] if early else [2, 2, 2])
