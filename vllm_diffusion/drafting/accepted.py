"""How much of its drafts verifications kept: what drafts are compared by."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

# By how much more tokens a verification a draft must give to be better than another, and by how many
# standard errors of the difference: one that was measured on a few answers may only have been lucky.
MARGIN = 0.02
# As many make it worse: one that is as good is taken for worse one time in forty.
NUM_ERRORS = 2.0
# Fewer verifications of a served draft are nothing to call another one worse by.
LEAST = 30
# A server remembers as many of the draft before, to compare another one with.
MOST = 10_000


@dataclass(frozen=True)
class Yield:
    """What verifying a draft gives.

    Attributes:
        tokens: A verification: those that it keeps, and the target's own.
        standard_error: Of that mean, with verifications taken as independent of one another.
    """

    tokens: float
    standard_error: float


@dataclass(frozen=True)
class Verifications:
    """Of a draft, counted by place in the block.

    Attributes:
        number: How many.
        drafted: Which of them were given a token at the place.
        accepted: Which kept it, and so all before it.
        tested: Which looked at it: everything before it was kept.
    """

    number: int = 0
    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    tested: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[int], num_places: int) -> Verifications:
        """From what each verification kept of a draft of ``num_places`` tokens."""
        accepted = [sum(length > place for length in lengths) for place in range(num_places)]
        return cls._of_whole_drafts(len(lengths), accepted)

    @classmethod
    def from_counters(
        cls, num_verifications: float, kept_by_position: Mapping[int, float]
    ) -> Verifications:
        """From the growth of vLLM's counters between two looks, which do not say how long drafts were.

        Args:
            num_verifications: Of ``vllm:spec_decode_num_drafts_total``.
            kept_by_position: Of ``vllm:spec_decode_num_accepted_tokens_per_pos_total``, by its label
                ``position``.

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
        """Those of one step of the engine.

        Args:
            stats: vLLM's ``SpecDecodingStats``, from which ``/metrics`` counts too. All requests of a step
                have drafts of one length, up to the ends of answers.
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
        """How many kept exactly 0, 1, ... leading tokens of their draft."""
        reached = itertools.pairwise((self.number, *self.accepted, 0))
        return tuple(here - there for here, there in reached)

    @property
    def tokens(self) -> float:
        """What one gave in the mean: the tokens that it kept, and the target's own."""
        return 1 + sum(self.accepted) / max(self.number, 1)

    @property
    def by_position(self) -> tuple[float, ...]:
        """Share of them that kept the token at a position, from the anchor on."""
        return tuple(count / max(self.number, 1) for count in self.accepted)

    def yield_of(self, num_places: int) -> Yield:
        """What they would have given with drafts of ``num_places`` tokens.

        Adaptive drafts have several lengths. So the shares that are kept, of the drafts that were tested
        at a place, are multiplied up (Kaplan and Meier), and the variance is Greenwood's. Where all
        drafts are as long it is their mean, and that mean's variance.
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
        """Whether they gave more tokens, by :data:`MARGIN` and beyond chance.

        They are taken to be independent of each other; nothing is better on none.
        """
        if not self.number or not other.number:
            return False
        more = self.tokens - other.tokens
        error = sqrt(self._cautious_squared_error() + other._cautious_squared_error())
        return more > max(MARGIN * other.tokens, NUM_ERRORS * error)

    def is_worse_than(self, other: Verifications) -> bool:
        """Whether they give fewer tokens beyond chance, of the places of the block that both drafted."""
        if other.number < LEAST:
            return False
        places = places_of_both(self, other)
        ours, theirs = self.yield_of(places), other.yield_of(places)
        error = sqrt(ours.standard_error**2 + theirs.standard_error**2)
        return ours.tokens + NUM_ERRORS * error < theirs.tokens

    def _cautious_squared_error(self) -> float:
        """Of the mean, with one of each length beside: a few that agree do not say that all would."""
        mean = self.tokens - 1
        total = sum((count + 1) * (at - mean) ** 2 for at, count in enumerate(self.lengths))
        return total / self.number**2


def _sum(some: Iterable[int], others: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(sum, itertools.zip_longest(some, others, fillvalue=0)))


def places_of_both(one: Verifications, other: Verifications) -> int:
    """How many places of the block were drafted with both."""
    pairs = zip(one.drafted, other.drafted, strict=False)
    return sum(bool(first and second) for first, second in pairs)
