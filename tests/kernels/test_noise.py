"""Tests of counter-based draws: the published generator and the right distributions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.noise import (
    LARGEST_NOISE,
    SMALLEST_NOISE,
    Purpose,
    gumbel_noise,
    philox,
    random_words,
    random_words_of,
    uniform_tokens,
)


def words(*values: int) -> list[torch.Tensor]:
    return [torch.tensor([value]) for value in values]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # Known answers of Philox4x32-10 from the authors' Random123 distribution (kat_vectors).
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_philox_known_answers(counter, key, expected):
    """Philox gives the published words for known counters and keys."""
    result = philox(tuple(words(*counter)), tuple(words(*key)))
    assert [int(word) for word in result] == list(expected)


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    canvas=st.integers(0, 1000),
    step=st.integers(0, 47),
    vocab=st.integers(1, 40),
    rows=st.integers(1, 6),
)
def test_draws_do_not_depend_on_the_batch(seed, canvas, step, vocab, rows):
    """A row's words are the same alone, in a batch, and for a larger vocabulary."""

    def draw(row_list: list[int], size: int) -> torch.Tensor:
        n = len(row_list)
        return random_words(
            torch.full((n,), seed),
            torch.full((n,), canvas),
            torch.full((n,), step),
            torch.tensor(row_list),
            size,
        )

    together = draw(list(range(rows)), vocab)
    for row in range(rows):
        assert torch.equal(draw([row], vocab)[0], together[row])
    assert torch.equal(draw(list(range(rows)), vocab + 5)[:, :vocab], together)


def test_every_part_of_the_key_matters():
    """Changing any one of seed, canvas, step, position and purpose changes the draws."""

    def tokens(seed=1, canvas=2, step=3, purpose=Purpose.RENOISE) -> torch.Tensor:
        return uniform_tokens(
            torch.tensor([seed]), torch.tensor([canvas]), torch.tensor([step]), 64, 2**18, purpose
        )

    base = tokens()
    others = [
        tokens(seed=1 + 2**32),
        tokens(seed=2),
        tokens(canvas=3),
        tokens(step=4),
        tokens(purpose=Purpose.INITIAL),
    ]
    for other in others:
        assert not torch.equal(base, other)
    assert base.unique().numel() > 60


def test_uniform_tokens_are_uniform():
    """320,000 draws over 320 ids pass a chi-square test at a fixed seed."""
    n = 10_000
    draws = uniform_tokens(
        torch.arange(n), torch.zeros(n), torch.zeros(n), 32, 320, Purpose.INITIAL
    )
    assert int(draws.min()) >= 0
    assert int(draws.max()) < 320
    counts = torch.bincount(draws.flatten(), minlength=320).double()
    expected = draws.numel() / 320
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    # Mean 319, standard deviation 25.3.
    assert abs(chi_square - 319) < 5 * math.sqrt(2 * 319)


def test_gumbel_max_follows_the_softmax():
    """Argmax of logits plus noise is distributed as their softmax (chi-square, fixed seeds)."""
    n, vocab = 40_000, 24
    logits = torch.linspace(-3, 3, vocab)
    noise = gumbel_noise(
        random_words(torch.arange(n), torch.zeros(n), torch.zeros(n), torch.zeros(n), vocab)
    )
    counts = torch.bincount((logits + noise).argmax(-1), minlength=vocab).double()
    expected = n * logits.double().softmax(-1)
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_square - (vocab - 1)) < 5 * math.sqrt(2 * (vocab - 1))


def test_noise_is_bounded():
    """The extreme words give the extreme noise, which is just within the bounds."""
    smallest, largest = gumbel_noise(torch.tensor([2**32 - 1, 0])).tolist()
    assert SMALLEST_NOISE < smallest < SMALLEST_NOISE + 0.1
    assert LARGEST_NOISE - 0.2 < largest < LARGEST_NOISE


def test_words_of_single_ids():
    """An id's word is the same alone as among all of its row."""
    rows, ids = torch.arange(40) % 3, torch.arange(40) * 7 % 37
    keys = torch.tensor([5, -9, 2**40]), torch.arange(3), torch.arange(3) + 4, torch.arange(3) * 8
    together = random_words(*keys, 37)
    alone = random_words_of(*(key[rows] for key in keys), ids)
    assert torch.equal(alone, together[rows, ids])
