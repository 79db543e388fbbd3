"""Counts of what verifications accepted of drafts, by which two drafts are compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# A better draft gives at least this share more tokens per verification: less is not worth a swap,
# for which a server computes every cache anew.
MARGIN = 0.02


@dataclass(frozen=True)
class Verifications:
    """Counts of a draft's verifications, by place in the block.

    Attributes:
        number: Number of verifications.
        accepted: Verifications that accepted the token at the place, and so all tokens before it.
    """

    number: int = 0
    accepted: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[int], num_places: int) -> Verifications:
        """Count the accepted ``lengths`` of drafts that all had ``num_places`` tokens."""
        accepted = (sum(length > place for length in lengths) for place in range(num_places))
        return cls(len(lengths), tuple(accepted))

    def __add__(self, other: Verifications) -> Verifications:
        return Verifications(self.number + other.number, _sum(self.accepted, other.accepted))

    @property
    def tokens(self) -> float:
        """Mean tokens per verification: the accepted ones, and the target's own."""
        return 1 + sum(self.accepted) / max(self.number, 1)

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of verifications that accepted the token at each position after the anchor."""
        return tuple(count / max(self.number, 1) for count in self.accepted)

    def is_better_than(self, other: Verifications) -> bool:
        """Return true if these gave more tokens than ``other``, by :data:`MARGIN`.

        This is the rule by which a draft replaces another one, and the only one.
        """
        return self.tokens >= (1 + MARGIN) * other.tokens


def _sum(some: Iterable[int], others: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(some, others, fillvalue=0)))
