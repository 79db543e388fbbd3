"""Acceptance statistics of drafts, by which two drafts are compared."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

# A better draft gives at least this share more tokens per verification, and its lead is at least
# this many standard errors of the difference: a draft that was measured on few answers may have
# been lucky.
MARGIN = 0.02
# A worse draft is behind by as many: an equally good draft is judged worse one time in forty.
NUM_ERRORS = 2.0
# Fewer verifications of the served draft are too few to call another draft worse.
LEAST = 30
# Verifications of the previous draft that a server remembers, to compare the next draft with.
MOST = 10_000


@dataclass(frozen=True)
class Yield:
    """Mean number of tokens that a verification gives, with its error.

    Attributes:
        tokens: Tokens per verification: the accepted drafts, and the target's own token.
        standard_error: Standard error of that mean; verifications are taken as independent.
    """

    tokens: float
    standard_error: float


@dataclass(frozen=True)
class Verifications:
    """Counts of a draft's verifications, by place in the block.

    Attributes:
        number: Number of verifications.
        drafted: Verifications whose draft had a token at the place.
        accepted: Verifications that accepted this token, and so all tokens before it.
        tested: Verifications that accepted all tokens before the place, and so tested this one.
    """

    number: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    tested: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[int], num_places: int) -> Verifications:
        """Count the accepted ``lengths`` of drafts that all had ``num_places`` tokens."""
        accepted = [sum(length > place for length in lengths) for place in range(num_places)]
        return cls._of_whole_drafts(len(lengths), accepted)

    @classmethod
    def from_counters(
        cls, num_verifications: float, kept_by_position: Mapping[int, float]
    ) -> Verifications:
        """Convert the growth of vLLM's counters between two readings.

        The counters do not tell how long drafts were, so every draft is taken as a whole one.

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
        return cls._of_whole_drafts(int(num_verifications), list(map(int, kept)))

    @classmethod
    def of_step(cls, stats: Any) -> Verifications:
        """Convert the statistics of one step of the engine.

        Args:
            stats: vLLM's ``SpecDecodingStats``, which ``/metrics`` counts too. All requests of a
                step have drafts of one length, except at the end of an answer.
        """
        drafted = tuple(stats.num_draft_tokens_per_pos)
        accepted = tuple(stats.num_accepted_tokens_per_pos)
        tested = tuple(map(min, drafted, (stats.num_drafts, *accepted)))
        return cls(stats.num_drafts, drafted, accepted, tested)

    @classmethod
    def _of_whole_drafts(cls, number: int, accepted: Sequence[int]) -> Verifications:
        return cls(
            number,
            (number,) * len(accepted),
            tuple(accepted),
            (number, *accepted[:-1]) if accepted else (),
        )

    def __add__(self, other: Verifications) -> Verifications:
        return Verifications(
            self.number + other.number,
            _sum(self.drafted, other.drafted),
            _sum(self.accepted, other.accepted),
            _sum(self.tested, other.tested),
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of verifications that accepted exactly 0, 1, ... leading tokens of their draft."""
        reached = itertools.pairwise((self.number, *self.accepted, 0))
        return tuple(here - there for here, there in reached)

    @property
    def tokens(self) -> float:
        """Mean tokens per verification: the accepted ones, and the target's own."""
        return 1 + sum(self.accepted) / max(self.number, 1)

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of verifications that accepted the token at each position behind the anchor."""
        return tuple(count / max(self.number, 1) for count in self.accepted)

    def yield_of(self, num_places: int) -> Yield:
        """Estimate the tokens per verification with drafts of ``num_places`` tokens.

        Adaptive drafts have several lengths. So the accepted shares of the drafts that were tested
        at each place are multiplied (Kaplan and Meier), and the variance is Greenwood's. If all
        drafts have the same length, the estimate is their mean, with the variance of that mean.
        """
        pairs = list(zip(self.accepted, self.tested, strict=True))[:num_places]
        reached, reaching = 1.0, []
        for accepted, tested in pairs:
            reached *= accepted / tested if tested else 0.0
            reaching.append(reached)
        variance = 0.0
        for place, (accepted, tested) in enumerate(pairs):
            if accepted:
                rest = sum(reaching[place:])
                variance += rest * rest * (tested - accepted) / (accepted * tested)
        return Yield(1.0 + sum(reaching), sqrt(variance))

    def is_better_than(self, other: Verifications) -> bool:
        """Return true if these gave more tokens than ``other``, by :data:`MARGIN` and beyond chance.

        The two samples are taken as independent; without verifications on both sides nothing is
        better.
        """
        if not self.number or not other.number:
            return False
        more = self.tokens - other.tokens
        error = sqrt(self._cautious_squared_error() + other._cautious_squared_error())
        return more > max(MARGIN * other.tokens, NUM_ERRORS * error)

    def is_worse_than(self, other: Verifications) -> bool:
        """Return true if these give fewer tokens than ``other`` beyond chance.

        Only the places of the block that both drafted are compared.
        """
        if other.number < LEAST:
            return False
        places = places_of_both(self, other)
        ours, theirs = self.yield_of(places), other.yield_of(places)
        error = sqrt(ours.standard_error**2 + theirs.standard_error**2)
        return ours.tokens + NUM_ERRORS * error < theirs.tokens

    def _cautious_squared_error(self) -> float:
        """Return the squared standard error of the mean, with one verification of each length added.

        The added ones keep the error of a few verifications that happen to agree from vanishing.
        """
        mean = self.tokens - 1
        total = sum((count + 1) * (at - mean) ** 2 for at, count in enumerate(self.lengths))
        return total / self.number**2


def _sum(some: Iterable[int], others: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(some, others, fillvalue=0)))


def places_of_both(one: Verifications, other: Verifications) -> int:
    """Return the number of places of the block that both drafted."""
    pairs = zip(one.drafted, other.drafted, strict=False)
    return sum(bool(first and second) for first, second in pairs)
