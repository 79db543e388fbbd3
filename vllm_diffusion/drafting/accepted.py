"""Counts of what verifications accepted of drafts, by which two drafts are compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
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

    @classmethod
    def from_counters(
        cls, num_verifications: float, kept_by_position: Mapping[int, float]
    ) -> Verifications:
        """Convert the growth of vLLM's counters between two readings.

        Args:
            num_verifications: Growth of ``vllm:spec_decode_num_drafts_total``.
            kept_by_position: Growth of ``vllm:spec_decode_num_accepted_tokens_per_pos_total``, by
                its label ``position``.

        Raises:
            ValueError: If more were kept at a position than at the one before it, or a position is
                left out: these are not counters of one server and time.
        """
        kept = [kept_by_position[at] for at in sorted(kept_by_position)]
        grows = any(there > here for here, there in itertools.pairwise([num_verifications, *kept]))
        if sorted(kept_by_position) != list(range(len(kept))) or grows:
            raise ValueError(
                f"{num_verifications:.0f} verifications cannot have kept {dict(kept_by_position)} "
                "tokens by position."
            )
        return cls(int(num_verifications), tuple(map(int, kept)))

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
