"""Counter-based random draws: Philox-4x32-10 keyed by what is drawn, never by who asks.

A draw depends on (request seed, canvas index, step, position, vocabulary id, purpose) and on
nothing else: not on the batch, a tile size, the rank or the device. The four counter words are

    0: vocabulary id // 4 (its remainder picks one of the four words that come out)
    1: position in the canvas
    2: step | purpose << 24
    3: canvas index

and the two key words are the halves of the request's 64-bit seed. All arithmetic is on int64
tensors that hold unsigned 32-bit values, so it compiles and runs the same on every device.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import enum
from typing import TypeVar

import torch
from torch import Tensor

Word = TypeVar("Word", int, Tensor)

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_NUM_ROUNDS = 10
_LOW_32 = 0xFFFFFFFF
# No Gumbel noise of 32 random bits lies outside: 33 log(2) = 22.88 and -log(24 log(2)) = -2.812,
# with room for how a device rounds its logarithms.
LARGEST_NOISE, SMALLEST_NOISE = 23.0, -2.9


class Purpose(enum.IntEnum):
    """Purpose of a draw; part of the counter, so that no two purposes share a draw."""

    INITIAL = 0
    CANDIDATE = 1
    RENOISE = 2
    REVEAL = 3


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> list[Word]:
    """Four random 32-bit words per counter.

    Args:
        counter: Four int64 tensors of unsigned 32-bit values that broadcast together, or numbers.
        key: Two int64 tensors of unsigned 32-bit values that broadcast with the counter, or
            numbers.

    Returns:
        Four int64 tensors, or numbers, with values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_NUM_ROUNDS):
        # The products wrap around in int64; their bits are those of the unsigned product.
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = ((product_1 >> 32) & _LOW_32) ^ c1 ^ k0
        c1 = product_1 & _LOW_32
        c2 = ((product_0 >> 32) & _LOW_32) ^ c3 ^ k1
        c3 = product_0 & _LOW_32
        k0 = (k0 + _WEYL_0) & _LOW_32
        k1 = (k1 + _WEYL_1) & _LOW_32
    return [c0, c1, c2, c3]


def halves(seed: Word) -> tuple[Word, Word]:
    """Split an integer of 64 bits into its words, the low one first."""
    return seed & _LOW_32, (seed >> 32) & _LOW_32


def random_words(
    seed: Tensor,
    canvas_idx: Tensor,
    step: Tensor,
    position: Tensor,
    num_ids: int,
    first_id: int = 0,
) -> Tensor:
    """One random word per row and vocabulary id, for candidates.

    Args:
        seed: [num_rows], int64.
        canvas_idx: [num_rows], integer.
        step: [num_rows], integer below 2**24.
        position: [num_rows], integer.
        num_ids: Number of vocabulary ids.
        first_id: The first of them, a multiple of 4.

    Returns:
        [num_rows, num_ids], int64 with values in [0, 2**32).
    """
    first_group, last_group = first_id // 4, (first_id + num_ids + 3) // 4
    group = torch.arange(first_group, last_group, device=seed.device, dtype=torch.int64)
    words = philox(
        (
            group[None, :],
            position.long()[:, None],
            step.long()[:, None] | (Purpose.CANDIDATE << 24),
            canvas_idx.long()[:, None],
        ),
        halves(seed.long()[:, None]),
    )
    return torch.stack(words, dim=-1).flatten(-2)[:, :num_ids]


def random_words_of(
    seed: Tensor, canvas_idx: Tensor, step: Tensor, position: Tensor, ids: Tensor
) -> Tensor:
    """The words of :func:`random_words` of some vocabulary ids alone.

    Args:
        seed: [n], int64, as the next three of the row of each id.
        canvas_idx: [n], integer.
        step: [n], integer below 2**24.
        position: [n], integer.
        ids: [n], int64.

    Returns:
        [n], int64 with values in [0, 2**32).
    """
    counter = ids // 4, position.long(), step.long() | (Purpose.CANDIDATE << 24), canvas_idx.long()
    words = torch.stack(philox(counter, halves(seed.long())))
    return words.gather(0, (ids % 4)[None])[0]


def gumbel_noise(words: Tensor) -> Tensor:
    """Standard Gumbel noise from random words.

    ``-log(-log(1 - v))`` with v near 0 where the noise is large: float32 resolves v there to
    2**-33, so that the tail, which decides among many unlikely tokens, is not quantised.

    Args:
        words: int64 with values in [0, 2**32).

    Returns:
        float32 of the same shape, between ``SMALLEST_NOISE`` and ``LARGEST_NOISE``.
    """
    # The largest word would round to v = 1; its noise is set to that of the largest v below.
    v = ((words.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def uniform_tokens(
    seed: Tensor, canvas_idx: Tensor, step: Tensor, length: int, vocab_size: int, purpose: Purpose
) -> Tensor:
    """One token per position, uniform over the vocabulary.

    Args:
        seed: [num_reqs], int64.
        canvas_idx: [num_reqs], integer.
        step: [num_reqs], integer below 2**24.
        length: Positions of a canvas.
        vocab_size: Number of vocabulary ids.
        purpose: Any but :attr:`Purpose.CANDIDATE`.

    Returns:
        [num_reqs, length], int64 with values in [0, vocab_size).
    """
    position = torch.arange(length, device=seed.device, dtype=torch.int64)
    word = philox(
        (
            torch.zeros_like(position)[None, :],
            position[None, :],
            step.long()[:, None] | (int(purpose) << 24),
            canvas_idx.long()[:, None],
        ),
        halves(seed.long()[:, None]),
    )[0]
    # Multiply-shift maps 32 random bits onto the vocabulary without a division; its bias is at
    # most vocab_size / 2**32.
    return (word * vocab_size) >> 32
