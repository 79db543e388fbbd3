"""Fast-dLLM v2's loop does what the publisher's does: small cases worked out by hand."""

from __future__ import annotations

import pytest

from tests.support.families import run
from tests.support.families.scripts import END, constant, decreasing, fast_dllm_loop, row


def test_shift():
    """A token is drawn from the row before it."""
    result = fast_dllm_loop(decreasing(24, by=0.01), [30, 31], threshold=0.0)
    # Row 1 says 11, for position 2; the seed of the next block is row 7's.
    assert result.tokens == [11, 12, 13, 14, 15, 16, 17]


def test_sub_blocks():
    """From left to right, each until it holds no mask; the best one of it a step, at least."""
    reverse = constant([row(10 + i, 0.1 + 0.05 * i) for i in range(8)])
    result = fast_dllm_loop(reverse, [30])
    assert result.revealed == [2, 1, 0, 6, 5, 4, 3, -1]
    assert [one.num_masked for one in result.passes] == [7, 6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("prompt_length", [8, 16])
def test_seed(prompt_length):
    """A prompt of whole blocks is prefilled, one of exactly one block too, and gives a seed."""
    result = fast_dllm_loop(
        decreasing(32, by=0.01), [30] * prompt_length, max_new_tokens=16, threshold=0.0
    )
    assert [one.kind for one in result.passes] == [
        "prefill",
        *(["denoise"] * 2 + ["commit"]) * 2,
    ]
    assert result.passes[1].num_masked == 7
    assert result.revealed[0] == result.revealed[8] == -1
    # Two blocks, and the seed of a third.
    assert result.tokens == [9 + prompt_length + i for i in range(17)]


def test_first_block_counts():
    """The block that holds the prompt's remainder is one of ``max_new_tokens // block_size``."""
    result = fast_dllm_loop(decreasing(32, by=0.01), [30] * 5, max_new_tokens=16, threshold=0.0)
    assert result.count("commit") == 2
    assert len(result.tokens) == 3 + 8 + 1


def test_stop_token():
    """With no mask before it, even where its block has masks left; no commit follows."""
    rows = [row(10 + i, 0.9) for i in range(8)]
    rows[2] = row(END, 0.9)
    result = fast_dllm_loop(constant(rows), [30], threshold=0.0)
    assert result.tokens == [10, 11, END]
    assert [one.kind for one in result.passes] == ["prefill", "denoise"][1:]


def test_stop_token_behind_masks():
    """It waits for the masks before it."""
    rows = [row(10 + i, 0.9 - 0.1 * i) for i in range(8)]
    rows[2] = row(END, 0.95)
    result = fast_dllm_loop(constant(rows), [30])
    assert result.revealed == [1, 2, 0]
    assert result.tokens == [10, 11, END]


def test_stop_token_as_seed():
    """A seed that stops ends before the next block."""
    rows = [row(10, 0.9)] * 16
    rows[7] = row(END, 0.9)
    result = fast_dllm_loop(constant(rows), [30], max_new_tokens=16, threshold=0.0)
    assert result.tokens == [10] * 7 + [END]
    assert result.count("commit") == 1


def test_seeds_are_not_drawn():
    """At a temperature the candidates are; their probability is the filtered one."""
    rows = [row(10, 0.5, second=11)] * 16
    result = fast_dllm_loop(
        constant(rows),
        [30] * 8,
        threshold=0.99,
        temperature=1.0,
        top_p=0.4,
        sample=run.keyed_sample(2),
    )
    # Of two equally likely tokens ``top_p`` leaves the first, whose probability is 1.
    assert result.count("denoise") == 2
    assert set(result.tokens) == {10}
