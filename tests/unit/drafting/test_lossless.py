"""What drafts and their verification say has the target's law: enumerated in fractions.

A target of three tokens says three of them, and a draft proposes all three. Both are random: the
target's distribution of a token depends on what it said before, the draft's of a position on whatever
it has revealed. Every block that the draft can propose and every outcome of its verification is
weighed; whatever the verification leaves unsaid, the target says.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from functools import cache

import pytest
import torch

from vllm_diffusion.drafting.reveal import (
    CONFIDENCE,
    ORDERS,
    POSITION,
    SCHEDULES,
    revealed,
    unmask_counts,
)

VOCAB, BLOCK = 3, 3
SEEDS = range(6)

Distribution = tuple[Fraction, ...]
Tokens = tuple[int, ...]
# Probability, tokens, and of each position the distribution that it is verified against.
Proposal = tuple[Fraction, Tokens, tuple[Distribution, ...]]


class Pair:
    """A random target and draft."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.target = cache(self._target)
        self.draft = cache(self._draft)

    def _random(self, *what: object) -> Distribution:
        numbers = random.Random(repr((self.seed, what)))
        weights = [numbers.randint(1, 12) for _ in range(VOCAB)]
        return tuple(Fraction(weight, sum(weights)) for weight in weights)

    def _target(self, before: Tokens) -> Distribution:
        return self._random("target", before)

    def _draft(self, block: tuple[int | None, ...], position: int) -> Distribution:
        return self._random("draft", block, position)

    def law(self) -> dict[Tokens, Fraction]:
        """Of the target's own three tokens."""
        law = {}
        for tokens in itertools.product(range(VOCAB), repeat=BLOCK):
            probability = Fraction(1)
            for i, token in enumerate(tokens):
                probability *= self.target(tokens[:i])[token]
            law[tokens] = probability
        return law


def one_hot(token: int) -> Distribution:
    return tuple(Fraction(token == other) for other in range(VOCAB))


def argmax(distribution: Distribution) -> int:
    return distribution.index(max(distribution))


def chosen(
    order: str, block: tuple[int | None, ...], rows: list[Distribution], count: int
) -> Tokens:
    """The positions that a pass reveals, as the model decides it."""
    masked = torch.tensor([[token is None for token in block]])
    confidence = torch.tensor([[float(max(row)) for row in rows]])
    return tuple(revealed(order, masked, confidence, count)[0].nonzero().flatten().tolist())


def passes(
    pair: Pair, order: str, counts: tuple[int, ...], *, sampled: bool
) -> Iterator[tuple[Fraction, Tokens, tuple[Distribution, ...]]]:
    """Blocks after all passes, and of each position the row of the pass that revealed it."""

    def after(
        probability: Fraction,
        block: tuple[int | None, ...],
        kept: tuple[Distribution | None, ...],
        left: tuple[int, ...],
    ) -> Iterator[tuple[Fraction, Tokens, tuple[Distribution, ...]]]:
        if not left:
            yield probability, block, kept  # type: ignore[misc]
            return
        rows = [pair.draft(block, position) for position in range(BLOCK)]
        positions = chosen(order, block, rows, left[0])
        options = [range(VOCAB) if sampled else [argmax(rows[position])] for position in positions]
        for tokens in itertools.product(*options):
            weight, new_block, new_kept = probability, list(block), list(kept)
            for position, token in zip(positions, tokens, strict=True):
                weight *= rows[position][token] if sampled else 1
                new_block[position], new_kept[position] = token, rows[position]
            yield from after(weight, tuple(new_block), tuple(new_kept), left[1:])

    yield from after(Fraction(1), (None,) * BLOCK, (None,) * BLOCK, counts)


def proposals(
    pair: Pair, order: str, counts: tuple[int, ...], *, sampled: bool
) -> Iterator[Proposal]:
    """What vLLM proposes from the rows that our model keeps: their argmax, or a draw from each."""
    for probability, block, rows in passes(pair, order, counts, sampled=False):
        if not sampled:
            assert tuple(argmax(row) for row in rows) == block
            yield probability, block, tuple(one_hot(token) for token in block)
            continue
        for tokens in itertools.product(range(VOCAB), repeat=BLOCK):
            weight = probability
            for row, token in zip(rows, tokens, strict=True):
                weight *= row[token]
            yield weight, tokens, rows


def left_over(p: Distribution, q: Distribution, scale: Fraction = Fraction(1)) -> Distribution:
    rest = [max(scale * a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]
    return tuple(one / sum(rest) for one in rest)


def standard(
    pair: Pair, block: Tokens, rows: tuple[Distribution, ...]
) -> Iterator[tuple[Fraction, Tokens]]:
    """Each token by p / q, until one is rejected (Leviathan et al., arXiv:2211.17192)."""
    reached = Fraction(1)
    for i, token in enumerate(block):
        p, q = pair.target(block[:i]), rows[i]
        accepted = min(Fraction(1), p[token] / q[token])
        if accepted < 1:
            for other, weight in enumerate(left_over(p, q)):
                yield reached * (1 - accepted) * weight, (*block[:i], other)
        reached *= accepted
    yield reached, block


def by_block(
    pair: Pair, block: Tokens, rows: tuple[Distribution, ...]
) -> Iterator[tuple[Fraction, Tokens]]:
    """The longest prefix that its own test accepts (Sun et al., arXiv:2403.10444)."""
    joint = [Fraction(1)]
    for i, token in enumerate(block):
        ratio = pair.target(block[:i])[token] / rows[i][token]
        joint.append(min(joint[-1] * ratio, Fraction(1)))
    accepted = [Fraction(1)]
    for i in range(1, BLOCK):
        p, q = pair.target(block[:i]), rows[i]
        mass = sum(max(joint[i] * a - b, Fraction(0)) for a, b in zip(p, q, strict=True))
        whole = mass + 1 - joint[i]
        accepted.append(mass / whole if whole else Fraction(1))
    accepted.append(joint[BLOCK])
    longer_fail = Fraction(1)
    for length in range(BLOCK, -1, -1):
        reached = longer_fail * accepted[length]
        longer_fail *= 1 - accepted[length]
        if length == BLOCK:
            yield reached, block
        elif reached:
            p, q = pair.target(block[:length]), rows[length]
            for other, weight in enumerate(left_over(p, q, joint[length])):
                yield reached * weight, (*block[:length], other)


VERIFICATIONS = {"standard": standard, "block": by_block}


def said(pair: Pair, proposed: Iterator[Proposal], verification: str) -> dict[Tokens, Fraction]:
    """The law of three tokens, of which the target says what the verification does not."""
    law: dict[Tokens, Fraction] = defaultdict(Fraction)
    for probability, block, rows in proposed:
        if not probability:
            continue
        for weight, tokens in VERIFICATIONS[verification](pair, block, rows):
            for rest in itertools.product(range(VOCAB), repeat=BLOCK - len(tokens)):
                whole = tokens + rest
                further = Fraction(1)
                for i in range(len(tokens), BLOCK):
                    further *= pair.target(whole[:i])[whole[i]]
                law[whole] += probability * weight * further
    return dict(law)


def variation(pair: Pair, law: dict[Tokens, Fraction]) -> Fraction:
    expected = pair.law()
    assert sum(law.values()) == 1
    return sum((abs(expected[x] - law.get(x, 0)) for x in expected), Fraction(0)) / 2


CONFIGURED = [
    (order, counts)
    for order in ORDERS
    for counts in sorted(
        {unmask_counts(BLOCK, n, name) for name in SCHEDULES for n in range(1, BLOCK + 1)}
    )
]


@pytest.mark.parametrize("verification", VERIFICATIONS)
@pytest.mark.parametrize("sampled", [False, True], ids=["one-hot", "sampled"])
def test_configured_combinations_are_exact(sampled: bool, verification: str) -> None:
    """Every order and schedule, with what vLLM proposes from it, under either verification."""
    # One pass, all in one pass each, and what lies between.
    assert len(CONFIGURED) >= 6
    for seed in SEEDS:
        pair = Pair(seed)
        for order, counts in CONFIGURED:
            law = said(pair, proposals(pair, order, counts, sampled=sampled), verification)
            assert variation(pair, law) == 0, (seed, order, counts)


def sampled_reveals(pair: Pair, order: str, *, as_one_hot: bool) -> Iterator[Proposal]:
    """One position a pass, with a token that is drawn: what is not served."""
    for probability, block, rows in passes(pair, order, (1, 1, 1), sampled=True):
        yield probability, block, tuple(map(one_hot, block)) if as_one_hot else rows


@pytest.mark.parametrize("verification", VERIFICATIONS)
def test_sampled_reveals_by_confidence_are_not(verification: str) -> None:
    """p / q knows nothing of what a token was drawn after. One-hot, or from the left, it would be."""
    distances = []
    for seed in SEEDS:
        pair = Pair(seed)
        by_confidence = sampled_reveals(pair, CONFIDENCE, as_one_hot=False)
        distances.append(variation(pair, said(pair, by_confidence, verification)))
        exact = (
            sampled_reveals(pair, CONFIDENCE, as_one_hot=True),
            sampled_reveals(pair, POSITION, as_one_hot=False),
        )
        assert all(variation(pair, said(pair, one, verification)) == 0 for one in exact)
    # One of these pairs is surest from left to right.
    assert sorted(distances)[1] > Fraction(1, 50)
    assert max(distances) > Fraction(3, 40)
