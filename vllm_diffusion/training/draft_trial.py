"""Whether a draft that took another one's place is worse, by what a server counts of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

# Where a server tells of it, beneath /v1, where vLLM asks for the key; and what it tells.
PATH = "/v1/draft"
PENDING, KEPT, ROLLED_BACK = "pending", "kept", "rolled back"
# A draft is worse if it gives fewer tokens a verification by more than so many standard errors of the
# difference. One that is as good is put back one time in forty.
STANDARD_ERRORS = 2.0
# Fewer verifications of the old draft are nothing to compare with.
LEAST = 30


@dataclass
class Verifications:
    """Of a draft, counted by place in the block.

    Attributes:
        number: How many.
        drafted: Which of them were given a token at the place.
        accepted: Which kept it.
        tested: Which looked at it: everything before it was kept.
    """

    number: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    tested: list[int] = field(default_factory=list)

    @classmethod
    def of_step(cls, stats: Any) -> Verifications:
        """Those of one step of the engine.

        Args:
            stats: vLLM's ``SpecDecodingStats``, from which ``/metrics`` counts too. All requests of a step
                have drafts of one length, up to the ends of answers.
        """
        drafted = list(stats.num_draft_tokens_per_pos)
        accepted = list(stats.num_accepted_tokens_per_pos)
        reached = [stats.num_drafts, *accepted]
        tested = [min(pair) for pair in zip(drafted, reached, strict=False)]
        return cls(stats.num_drafts, drafted, accepted, tested)

    def __add__(self, other: Verifications) -> Verifications:
        return Verifications(
            self.number + other.number,
            _sum(self.drafted, other.drafted),
            _sum(self.accepted, other.accepted),
            _sum(self.tested, other.tested),
        )


def _sum(some: Sequence[int], others: Sequence[int]) -> list[int]:
    if not some or not others:
        return list(some or others)
    return [one + other for one, other in zip(some, others, strict=True)]


@dataclass(frozen=True)
class Yield:
    """What verifying a draft gives.

    Attributes:
        tokens: A verification: those that it keeps, and the target's own.
        standard_error: Of that mean, with verifications taken as independent of one another.
    """

    tokens: float
    standard_error: float


def yield_of(counts: Verifications, num_places: int) -> Yield:
    """Tokens a verification of drafts with ``num_places`` tokens.

    Adaptive drafts have several lengths. So the shares that are kept, of the drafts that were tested at a
    place, are multiplied up (Kaplan and Meier), and the variance is Greenwood's. Where all drafts are as
    long it is their mean, and that mean's variance.
    """
    pairs = list(zip(counts.accepted, counts.tested, strict=True))[:num_places]
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


def places_of_both(one: Verifications, other: Verifications) -> int:
    """How many places of the block were drafted with both."""
    pairs = zip(one.drafted, other.drafted, strict=False)
    return sum(bool(first and second) for first, second in pairs)


def is_worse(new: Verifications, old: Verifications) -> bool:
    """Whether the new draft gives fewer tokens a verification, beyond chance."""
    if old.number < LEAST:
        return False
    places = places_of_both(new, old)
    ours, theirs = yield_of(new, places), yield_of(old, places)
    error = sqrt(ours.standard_error**2 + theirs.standard_error**2)
    return ours.tokens + STANDARD_ERRORS * error < theirs.tokens
