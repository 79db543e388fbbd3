"""The published loops do what the publishers' do in small cases worked out by hand.

tests/integration/families checks that the engine's tokens are a loop's, in every setting.
"""

import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.support.families import dream_reasoner, llada2, nemotron, run, stable_diffcoder
from tests.support.families.model import scripted

VOCAB, MASK, END = 100, 4, 1
DELETE, SPLIT = 98, 99


def row(token: int, p: float, second: int | None = None) -> Tensor:
    """[VOCAB]: logits under which ``token`` has probability ``p``, and ``second`` all the rest.

    Without a second all other tokens share the rest; with ``p=0.5`` and a second both are exactly
    as likely, and the softmax is exact.
    """
    rest = (1 - p) / (VOCAB - 1)
    logits = torch.full((VOCAB,), math.log(rest) if second is None else float("-inf"))
    if second is not None:
        logits[second] = math.log(1 - p)
    logits[token] = math.log(p)
    return logits


def constant(rows: Sequence[Tensor]) -> run.Model:
    """A model that predicts the same at each position whatever stands there."""
    return scripted(lambda ids: torch.stack(list(rows[: len(ids)])))


def decreasing(length: int, *, first: float = 0.9, by: float = 0.05, token: int = 10) -> run.Model:
    """Position i predicts ``token + i``, each with less certainty than the one before."""
    return constant([row(token + i, first - by * i) for i in range(length)])


llada2_0_loop = partial(
    llada2.generate_2_0,
    prompt_ids=(),
    mask_id=MASK,
    eos_id=END,
    gen_length=8,
    block_length=8,
    steps=8,
)
llada2_1_loop = partial(
    llada2.generate_2_1, prompt_ids=(), mask_id=MASK, eos_id=END, gen_length=4, block_length=4
)
llada2_2_loop = partial(
    llada2.generate_2_2,
    prompt_ids=(),
    mask_id=MASK,
    eos_ids=(END,),
    delete_token_id=DELETE,
    split_token_id=SPLIT,
    gen_length=4,
    block_length=4,
    steps=4,
)
nemotron_loop = partial(nemotron.generate, max_new_tokens=8, block_length=8, mask_id=MASK)
linear_spec_loop = partial(
    nemotron.linear_spec_generate, max_new_tokens=9, block_length=4, mask_token_id=MASK
)
stable_diffcoder_loop = partial(
    stable_diffcoder.generate_block,
    prompt_ids=(),
    mask_id=MASK,
    steps=8,
    gen_length=8,
    block_length=4,
)
dream_reasoner_loop = partial(
    dream_reasoner.generate, prompt_ids=(), mask_id=MASK, gen_length=8, block_length=8
)


def test_llada2_end_token_of_2_0():
    """An end token that is revealed before earlier masks waits for the end of its block."""
    rows = [row(10 + i, 0.9 - 0.05 * i) for i in range(16)]
    rows[1] = row(END, 0.85)
    result = llada2_0_loop(constant(rows), gen_length=16, threshold=0.95)
    assert result.tokens == [10, END]
    assert result.count("denoise") == 8


def test_llada2_ends_with_a_step_that_changes_nothing():
    """A step that changes nothing leaves final keys and values, so no pass commits."""
    result = llada2_1_loop(
        constant([row(10, 0.9)] * 12), gen_length=12, threshold=0.5, editing_threshold=0.5
    )
    assert [(one.kind, one.num_masked) for one in result.passes] == [
        ("denoise", 4),
        ("denoise", 0),
    ] * 3


@pytest.mark.parametrize(
    ("editing_threshold", "expected"), [(0.0, 20), (0.19, 20), (0.21, 10), (0.9, 10)]
)
def test_llada2_editing(editing_threshold, expected):
    """A decided token is replaced by a likelier one above the threshold, also at threshold 0."""

    def script(ids: Sequence[int]) -> Tensor:
        first = row(10, 0.9) if MASK in ids else row(20, 0.2)
        return torch.stack([first] + [row(11, 0.9)] * (len(ids) - 1))

    result = llada2_1_loop(scripted(script), threshold=0.5, editing_threshold=editing_threshold)
    assert result.tokens == [expected, 11, 11, 11]
    assert result.rewritten == (expected == 20)
    assert result.count("denoise") == (3 if expected == 20 else 2)


def test_llada2_editing_threshold_is_strict():
    """A probability of exactly the threshold does not edit a token."""

    def script(ids: Sequence[int]) -> Tensor:
        said = row(10, 0.9) if MASK in ids else row(20, 0.5, second=21)
        return torch.stack([said] * len(ids))

    kept = llada2_1_loop(scripted(script), threshold=0.5, editing_threshold=0.5)
    assert kept.tokens == [10] * 4
    edited = llada2_1_loop(scripted(script), threshold=0.5, editing_threshold=0.49)
    assert edited.tokens == [20] * 4


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
def test_llada22_apply_edits(written, expected, marks):
    """DELETE shifts left and fills up; SPLIT restores the old token after a new mask."""
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


def test_llada22_final_round():
    """If the first token is always to be deleted, the last step takes its second choice."""

    def script(ids: Sequence[int]) -> Tensor:
        rows = [row(10 + i, 0.95) for i in range(4)]
        if ids[-1] != MASK:
            rows[0] = row(DELETE, 0.9, second=30)
        return torch.stack(rows)

    result = llada2_2_loop(scripted(script), max_post_steps=3)
    assert DELETE not in result.tokens
    assert MASK not in result.tokens
    assert result.tokens[0] == 30
    # Filled, three rounds without first masks, the last of which is final, and no more.
    assert result.count("denoise") <= 1 + 2 * 3


def test_llada22_anti_loop():
    """A repeated result is avoided by the second choice of the least certain change."""

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


def test_nemotron_probability_has_no_temperature():
    """The temperature changes candidates and not their confidence."""
    even = constant([row(10, 0.5, second=11)] * 9)
    result = nemotron_loop(even, [30], threshold=0.5, temperature=5.0, sample=run.keyed_sample(1))
    assert result.count("denoise") == 1
    assert set(result.tokens) == {10, 11}


def test_nemotron_end_token():
    """A block ends at an end token with no mask before it, is committed, and is cut after it."""
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


def test_nemotron_linear_spec_accepts_what_agrees():
    """A model that predicts i at position i + 1, in a draft and before it, keeps the whole block.

    Row p of the causal pass predicts p + 11; a draft's row p predicts p + 10, the same token.
    """

    def script(ids: Sequence[int]) -> Tensor:
        # A draft holds masks, the pass that verifies it holds none.
        offset = 10 if MASK in ids else 11
        return torch.stack([row(offset + p, 0.9) for p in range(len(ids))])

    result = linear_spec_loop(scripted(script), [30])
    assert result.tokens == list(range(11, 20))
    kinds = [one.kind for one in result.passes]
    assert kinds == ["prefill", "draft", "verify", "draft", "verify"]


def test_stable_diffcoder_end_token():
    """A full block with an end token is filled with it up to its end and needs no commit."""
    rows = [row(10, 0.99)] * 8
    rows[1] = row(END, 0.99)
    result = stable_diffcoder_loop(constant(rows), eos_id=END)
    assert result.tokens == [10, END, END, END]
    assert [one.kind for one in result.passes] == ["denoise"]


@pytest.mark.parametrize("strategy", ["dynamic", "static", "sequential"])
@pytest.mark.parametrize("num_given", [0, 1, 5])
def test_dream_reasoner_last_step_leaves_no_mask(strategy, num_given):
    """The last step reveals all masks that are left, wherever in a block the prompt ends."""
    name = strategy if strategy == "sequential" else f"low_confidence_{strategy}"
    for steps in range(1, 10):
        result = dream_reasoner_loop(
            decreasing(16),
            prompt_ids=[30] * num_given,
            gen_length=8 - num_given,
            remasking_strategy=name,
            denoising_steps=steps,
        )
        assert MASK not in result.tokens
        assert result.count("denoise") <= steps
