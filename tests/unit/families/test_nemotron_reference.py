"""Nemotron's loops do what the publisher's do: small cases worked out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.support.families import model, nemotron, run
from tests.support.families.model import MASK_ID, prompt_of, scripted
from tests.support.families.scripts import (
    END,
    MASK,
    blocks,
    constant,
    decreasing,
    linear_spec_loop,
    nemotron_loop,
    row,
)


def test_seed():
    """The prompt's causal pass gives a block's first token; the rest starts as masks."""
    tiny = run.suppress(model.nemotron(), [MASK_ID])
    prompt = prompt_of(9)
    first = nemotron.ar_generate(tiny, prompt, max_new_tokens=1).tokens
    result = nemotron.generate(
        tiny, prompt, max_new_tokens=16, block_length=8, threshold=0.3, mask_id=MASK_ID
    )
    assert result.tokens[:1] == first
    assert result.revealed[0] == result.revealed[8] == -1
    assert [one.num_masked for one in result.passes if one.kind == "commit"] == [0, 0]
    # The second block's seed is what the causal pass over everything before it says.
    following = nemotron.ar_generate(tiny, prompt + result.tokens[:8], max_new_tokens=1)
    assert result.tokens[8:9] == following.tokens


def test_even_schedule():
    """Without a threshold one mask a step: a block less its seed, and one commit."""
    result = nemotron_loop(decreasing(17), [30], max_new_tokens=16)
    assert blocks(result, "denoise") == [7, 7]
    assert blocks(result, "commit") == [1, 1]
    assert result.count("prefill") == 1


def test_probability_has_no_temperature():
    """Candidates get the temperature, confidence does not."""
    even = constant([row(10, 0.5, second=11)] * 9)
    result = nemotron_loop(even, [30], threshold=0.5, temperature=5.0, sample=run.keyed_sample(1))
    assert result.count("denoise") == 1
    assert set(result.tokens) == {10, 11}


def test_end_token():
    """A block ends at an end token with no mask before it, is committed, and cut behind it."""
    rows = [row(10 + i, 0.9 - 0.05 * i) for i in range(9)]
    rows[3] = row(END, 0.99)
    result = nemotron_loop(
        constant(rows), [30], max_new_tokens=16, threshold=0.95, eos_token_id=END
    )
    # Positions 1 (the seed), 3 (the end, at once), then 2 by being the best.
    assert result.tokens == [10, 12, END]
    assert result.revealed == [-1, 1, 0]
    assert [one.kind for one in result.passes] == ["prefill", "denoise", "denoise", "commit"]
    assert result.passes[-1].num_masked == 5


def test_whole_blocks():
    """As in the publisher's loop the length is a whole number of blocks."""
    with pytest.raises(ValueError, match="max_new_tokens=9"):
        nemotron_loop(decreasing(9), [30], max_new_tokens=9)


def test_autoregressive():
    """One pass a token, of which the prompt's is the first; an end token is the last."""
    rows = [row(10 + i, 0.9) for i in range(8)]
    rows[4] = row(END, 0.9)
    result = nemotron.ar_generate(constant(rows), [30, 30], max_new_tokens=6, eos_token_id=END)
    assert result.tokens == [11, 12, 13, END]
    assert result.count("prefill", "decode") == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("threshold", [0.0, 0.6])
@pytest.mark.parametrize("prompt_length", [1, 8, 13])
def test_linear_spec_is_autoregressive(prompt_length, threshold, temperature):
    """Token by token, whatever the drafts are, with the draws of the verifying pass keyed."""
    # Two ids, so that drafts agree now and then.
    tiny = run.suppress(model.nemotron(), set(range(320)) - {100, 101})
    prompt = prompt_of(prompt_length)
    settings = {
        "max_new_tokens": 20,
        "temperature": temperature,
        "sample": run.keyed_sample(5),
    }
    expected = nemotron.ar_generate(tiny, prompt, **settings).tokens
    result = nemotron.linear_spec_generate(
        tiny,
        prompt,
        block_length=8,
        threshold=threshold,
        mask_token_id=MASK_ID,
        draft_sample=run.keyed_sample(6),
        **settings,
    )
    assert result.tokens[:20] == expected
    verified = [one.start for one in result.passes if one.kind == "verify"]
    accepted = [b - a for a, b in itertools.pairwise(verified)]
    assert all(1 <= count <= 8 for count in accepted)


def test_linear_spec_accepts_what_agrees():
    """A model that says i at position i + 1 of a draft, and before it: the whole block is kept.

    Row p of the causal pass says p + 11; a draft's row p says p + 10, which is the same token.
    """

    def script(ids: Sequence[int]) -> Tensor:
        # A draft holds masks, the pass that verifies it holds none.
        offset = 10 if MASK in ids else 11
        return torch.stack([row(offset + p, 0.9) for p in range(len(ids))])

    result = linear_spec_loop(scripted(script), [30])
    assert result.tokens == list(range(11, 20))
    kinds = [one.kind for one in result.passes]
    assert kinds == ["prefill", "draft", "verify", "draft", "verify"]


def test_linear_spec_ends():
    """At an end token, which is the last one returned; a seed that is one ends it at once."""

    def script(ids: Sequence[int]) -> Tensor:
        offset = 10 if MASK in ids else 11
        said = [offset + p for p in range(len(ids))]
        return torch.stack([row(END if token == 13 else token, 0.9) for token in said])

    result = linear_spec_loop(scripted(script), [30], eos_token_id=END)
    assert result.tokens == [11, 12, END]
    at_once = linear_spec_loop(constant([row(END, 0.9)] * 9), [30], eos_token_id=END)
    assert at_once.tokens == [END]
    assert [one.kind for one in at_once.passes] == ["prefill"]
