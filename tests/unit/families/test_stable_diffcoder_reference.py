"""Stable-DiffCoder's loop does what the publisher's does: small cases worked out by hand."""

from __future__ import annotations

import pytest

from tests.support.families.scripts import (
    END,
    blocks,
    constant,
    decreasing,
    row,
    stable_diffcoder_loop,
)


def test_schedule():
    """Without a threshold, an even number of masks a step; fewer steps take more each."""
    result = stable_diffcoder_loop(decreasing(8), threshold=None)
    assert result.revealed == [0, 1, 2, 3] * 2
    result = stable_diffcoder_loop(decreasing(8), threshold=None, steps=4)
    assert result.revealed == [0, 0, 1, 1] * 2


@pytest.mark.parametrize("prompt_length", [1, 4, 6])
def test_length(prompt_length):
    """Exactly ``gen_length`` tokens: the last block is as much shorter as the first is."""
    result = stable_diffcoder_loop(decreasing(16), prompt_ids=[30] * prompt_length)
    assert len(result.tokens) == 8
    remainder = prompt_length % 4
    masked = [one.num_masked for one in result.passes if one.kind == "denoise"]
    assert masked[0] == 4 - remainder
    assert blocks(result, "commit") == [1] * (3 if remainder else 2)
    assert result.count("prefill") == (prompt_length >= 4)


def test_end_token():
    """A full block with one ends without a commit, filled with it to its end."""
    rows = [row(10, 0.99)] * 8
    rows[1] = row(END, 0.99)
    result = stable_diffcoder_loop(constant(rows), eos_id=END)
    assert result.tokens == [10, END, END, END]
    assert [one.kind for one in result.passes] == ["denoise"]


def test_end_token_in_the_prompt():
    """It ends nothing."""
    result = stable_diffcoder_loop(constant([row(10, 0.99)] * 12), prompt_ids=[30, END], eos_id=END)
    assert result.tokens == [10] * 8


def test_bad_lengths():
    """As in the publisher's loop; and a block may not be left with masks."""
    with pytest.raises(ValueError, match="gen_length=9"):
        stable_diffcoder_loop(decreasing(9), gen_length=9)
    with pytest.raises(ValueError, match="steps=7"):
        stable_diffcoder_loop(decreasing(9), steps=7)
    with pytest.raises(ValueError, match="masks are left"):
        stable_diffcoder_loop(decreasing(8), steps=4, threshold=0.99)
