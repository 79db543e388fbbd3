"""SDAR's loop does what the publisher's does: small cases worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.families import run
from tests.support.families.model import scripted
from tests.support.families.scripts import END, MASK, constant, decreasing, row, sdar_loop


def test_dynamic():
    """Everything above the threshold, or the schedule's number where that is more."""
    result = sdar_loop(decreasing(8), confidence_threshold=0.77)
    assert result.revealed == [0, 0, 0, 1, 2, 3, 4, 5]
    assert result.tokens == list(range(10, 18))
    few = sdar_loop(decreasing(8), confidence_threshold=0.77, denoising_steps=2)
    assert few.revealed == [0, 0, 0, 0, 1, 1, 1, 1]


def test_static():
    """The schedule's number of the most confident, whatever the threshold."""
    reverse = constant([row(10, 0.3 + 0.05 * i) for i in range(8)])
    result = sdar_loop(
        reverse,
        denoising_steps=3,
        remasking_strategy="low_confidence_static",
        confidence_threshold=0.0,
    )
    assert result.revealed == [2, 2, 1, 1, 1, 0, 0, 0]


def test_sequential():
    """From left to right, whatever is more certain."""
    reverse = constant([row(10, 0.3 + 0.05 * i) for i in range(8)])
    result = sdar_loop(reverse, denoising_steps=3, remasking_strategy="sequential")
    assert result.revealed == [0, 0, 0, 1, 1, 1, 2, 2]


def test_prompt_remainder():
    """The prompt's last tokens are the first block's, fixed; blocks start at multiples."""
    result = sdar_loop(
        decreasing(24, by=0.02), prompt_ids=[30] * 10, gen_length=9, confidence_threshold=0.0
    )
    assert [(one.kind, one.start) for one in result.passes] == [
        ("prefill", 0),
        ("denoise", 8),
        ("commit", 8),
        ("denoise", 16),
        ("commit", 16),
    ]
    assert result.passes[1].num_masked == 6
    assert result.tokens == list(range(20, 34))


def test_decided_positions_stay():
    """More to reveal than masks are left: the prompt's tokens are not touched."""
    seen: list[list[int]] = []

    def script(ids: Sequence[int]) -> Tensor:
        seen.append(list(ids))
        return torch.stack([row(10, 0.9)] * len(ids))

    result = sdar_loop(
        scripted(script), prompt_ids=[30, 31, 32], gen_length=5, block_length=4, denoising_steps=1
    )
    assert result.tokens == [10] * 5
    assert seen[-1][:4] == [30, 31, 32, 10]


def test_end_token():
    """Looked for when the block is finished and committed; its block is returned whole."""
    rows = [row(10, 0.9)] * 16
    rows[1] = row(END, 0.9)
    result = sdar_loop(
        constant(rows),
        gen_length=16,
        block_length=4,
        denoising_steps=4,
        stopping_criteria_idx=[END],
    )
    assert result.tokens == [10, END, 10, 10]
    assert result.passes[-1].kind == "commit"
    endless = sdar_loop(constant(rows), gen_length=16, block_length=4, denoising_steps=4)
    assert len(endless.tokens) == 16


def test_probability_is_of_the_filtered_draw():
    """With one token left by ``top_k`` its probability is 1, however flat the logits are."""
    flat = constant([row(10, 0.1)] * 8)
    result = sdar_loop(flat, temperature=1.0, top_k=1, confidence_threshold=0.99)
    assert result.count("denoise") == 1
    assert result.tokens == [10] * 8


def test_temperature_zero_ignores_filters():
    """There the probability is the plain one."""
    flat = constant([row(10, 0.1)] * 8)
    result = sdar_loop(flat, temperature=0.0, top_k=1, confidence_threshold=0.99)
    assert result.count("denoise") == 8


def test_drawn_mask_is_an_error():
    """Masks that are left after the last step are not returned."""
    masks = constant([row(MASK, 0.9)] * 8)
    with pytest.raises(ValueError, match="mask token was drawn"):
        sdar_loop(masks)
    result = sdar_loop(run.suppress(masks, [MASK]))
    assert MASK not in result.tokens


def test_unknown_strategy():
    """Named, where the publisher's ``entropy_bounded`` would run into an unassigned name."""
    with pytest.raises(ValueError, match="entropy_bounded"):
        sdar_loop(decreasing(8), remasking_strategy="entropy_bounded")
