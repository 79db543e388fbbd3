"""How much of its drafts verifications kept: what drafts are compared by."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# By how much more tokens a verification a draft must give to be better than another, and by how many
# standard errors of the difference: one that was measured on a few answers may only have been lucky.
MARGIN = 0.02
NUM_ERRORS = 2.0


@dataclass(frozen=True)
class AcceptedLengths:
    """A histogram.

    Attributes:
        counts: Verifications that kept exactly 0, 1, ... leading tokens of their draft.
    """

    counts: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[int]) -> AcceptedLengths:
        """From what each verification kept."""
        return cls(tuple(lengths.count(kept) for kept in range(max(lengths, default=-1) + 1)))

    @classmethod
    def from_counters(
        cls, num_verifications: float, kept_by_position: Mapping[int, float]
    ) -> AcceptedLengths:
        """From the growth of vLLM's counters between two looks.

        Args:
            num_verifications: Of ``vllm:spec_decode_num_drafts_total``.
            kept_by_position: Of ``vllm:spec_decode_num_accepted_tokens_per_pos_total``, by its label
                ``position``.

        Raises:
            ValueError: If more were kept at a position than at the one before it, or a position is
                left out: these are not counters of one server and time.
        """
        reached = [num_verifications, *(kept_by_position[at] for at in sorted(kept_by_position)), 0]
        counts = [int(here - there) for here, there in itertools.pairwise(reached)]
        if sorted(kept_by_position) != list(range(len(kept_by_position))) or min(counts) < 0:
            raise ValueError(
                f"{num_verifications:.0f} verifications cannot have kept {dict(kept_by_position)} "
                "tokens by position."
            )
        return cls(tuple(counts))

    def __add__(self, other: AcceptedLengths) -> AcceptedLengths:
        both = itertools.zip_longest(self.counts, other.counts, fillvalue=0)
        return AcceptedLengths(tuple(ours + theirs for ours, theirs in both))

    @property
    def num_verifications(self) -> int:
        return sum(self.counts)

    @property
    def tokens_per_verification(self) -> float:
        """What one gives in the mean: the tokens that it kept, and the target's own."""
        kept = sum(length * count for length, count in enumerate(self.counts))
        return 1 + kept / max(self.num_verifications, 1)

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of the verifications that kept the token at a position, from the anchor on."""
        reached = itertools.accumulate(reversed(self.counts[1:]))
        return tuple(count / max(self.num_verifications, 1) for count in reached)[::-1]

    def is_better_than(self, other: AcceptedLengths) -> bool:
        """Whether it gives more tokens a verification, by :data:`MARGIN` and beyond chance.

        Verifications are taken to be independent of each other; nothing is better on none.
        """
        if not self.num_verifications or not other.num_verifications:
            return False
        more = self.tokens_per_verification - other.tokens_per_verification
        error = (self._squared_error() + other._squared_error()) ** 0.5
        return more > max(MARGIN * other.tokens_per_verification, NUM_ERRORS * error)

    def _squared_error(self) -> float:
        """Of the mean."""
        mean = self.tokens_per_verification - 1
        total = sum(count * (length - mean) ** 2 for length, count in enumerate(self.counts))
        # One of each length beside: a few that agree do not say that all would.
        beside = sum((length - mean) ** 2 for length in range(len(self.counts)))
        return (total + beside) / self.num_verifications**2
