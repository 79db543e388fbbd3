"""Choice of the number of drafted tokens for each step, from measured acceptance and step times.

Drafting pays where a verification gives more tokens a second than a step without one. Both sides
change: acceptance with the text, seconds with the number of requests and their length. So both are
measured, by level (how many tokens are drafted) and by load, and the level with the most tokens a
second is chosen; another one must be better by :data:`MARGIN`. Without drafts nothing is learnt of
acceptance, so from time to time a level is probed, for no more than :data:`PROBING` of all seconds.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Share by which another level must promise more tokens per second.
MARGIN = 0.03
# A level that is this many times as fast as no drafts is trusted without a probe of no drafts.
CLEARLY = 1.5
# Share of all seconds that probes may lose, and the number of steps whose time they may save up.
PROBING = 0.01
SAVED_STEPS = 8
# Verifying steps after which half of what was seen before has gone.
HALF_LIFE = 8.0
# Drafts of a request that weigh as much as what is believed before it has any; of the first ones,
# too.
BELIEF = 4.0
# Steps at one level and load, of which the quickest is its cost: a start, a pause, and whatever
# else a machine is busy with only make steps longer, and a mean would count them.
NUM_COSTS = 5
# Steps of a probe: the first one only drafts what the second one verifies, in addition to what it
# drafts.
PROBE_STEPS = 2
# Steps at each of the two levels that are measured first: one more than of a probe.
FIRST_STEPS = PROBE_STEPS + 1


class Acceptance:
    """Acceptance rates of drafted tokens whose predecessors were accepted, per request and over
    all.

    Traffic changes with its requests: the draft may know the text of one and not that of the next.
    So a request is taken to be like all others until its own drafts tell, and the rejected drafts
    of one request do not count against another.

    Args:
        num_positions: Tokens of the longest draft.
    """

    def __init__(self, num_positions: int) -> None:
        self._positions = np.arange(num_positions)
        # [accepted or tested, position]. One token of two, until more is known: what the longest
        # draft is tried on, and a few drafts of bad luck do not end.
        self._of_all = np.stack(
            [np.full(num_positions, 0.5 * BELIEF), np.full(num_positions, BELIEF)]
        )
        # The same of each request that is running.
        self._of_request: dict[str, Any] = {}

    def observe(self, num_drafted: int, accepted: Mapping[str, int]) -> None:
        """Record a step that verified ``num_drafted`` tokens per request, and the accepted ones."""
        lengths = np.fromiter(accepted.values(), dtype=np.int64, count=len(accepted))[:, None]
        # Counts of positions that no draft reached decay as well: the position is then taken to be
        # as the one before it.
        is_drafted = self._positions < num_drafted
        # [request, accepted or tested, position]
        seen = (
            np.stack([lengths > self._positions, lengths >= self._positions], axis=1) & is_drafted
        )
        kept = 0.5 ** (1 / HALF_LIFE)
        self._of_all = kept * self._of_all + seen.sum(axis=0)
        for request, of_request in zip(accepted, seen, strict=True):
            before = self._of_request.get(request, 0.0)
            self._of_request[request] = kept * before + of_request

    def tokens(self, requests: Sequence[str]) -> list[float]:
        """Return the expected tokens of a verification for each number of drafted tokens, from 0
        on.

        Both the accepted drafts and the target's own token count.

        Args:
            requests: Running requests, over which the mean is taken; others are forgotten.
        """
        self._of_request = {
            request: self._of_request[request]
            for request in requests
            if request in self._of_request
        }
        rates = self._rates()
        unknown = np.zeros_like(self._of_all)
        counts = np.stack([self._of_request.get(request, unknown) for request in requests or [""]])
        # A request's position that was seldom reached is to the one before it as it is with all
        # requests.
        reached = np.ones(len(counts))
        rate, of_all = reached, 1.0
        expected = [1.0]
        for position, rate_of_all in enumerate(rates):
            likely = np.minimum(rate * (rate_of_all / of_all), 1.0)
            rate = (counts[:, 0, position] + BELIEF * likely) / (counts[:, 1, position] + BELIEF)
            reached = reached * rate
            expected.append(expected[-1] + float(reached.mean()))
            of_all = rate_of_all
        return expected

    def _rates(self) -> list[float]:
        # A position that was seldom reached is taken to be as the one before it.
        rates = [0.5]
        for accepted, tested in self._of_all.T.tolist():
            rates.append((accepted + rates[-1]) / (tested + 1))
        return rates[1:]


# Requests and their mean tokens, to the power of two above.
Load = tuple[int, int]


class Costs:
    """Seconds of a step by level and load, measured where it was run, and estimated elsewhere.

    Attributes:
        measured: The latest steps of each load and level that were run.
    """

    def __init__(self) -> None:
        self.measured: dict[Load, dict[int, deque[float]]] = {}

    def observe(self, level: int, load: Load, seconds: float) -> None:
        """Record the seconds of one step."""
        levels = self.measured.setdefault(load, {})
        levels.setdefault(level, deque(maxlen=NUM_COSTS)).append(seconds)

    def estimate(self, level: int, load: Load) -> float:
        """Estimate a step's seconds: the quickest at this load, or in proportion to a similar one.

        A level that was never run lies on the line between its measured neighbours. No level costs
        more than a higher one did at this load.

        Raises:
            ValueError: If nothing was measured.
        """
        here = self._quickest(load)
        above = [seconds for other, seconds in here.items() if other > level]
        return min([self._estimate(level, load, here), *above])

    def _estimate(self, level: int, load: Load, here: dict[int, float]) -> float:
        # Requests count first: each has rows of its own in every layer.
        by_likeness = sorted(
            self.measured, key=lambda other: (abs(other[0] - load[0]), abs(other[1] - load[1]))
        )
        for other in by_likeness:
            there = self._quickest(other)
            if level in there:
                shared = sorted(here.keys() & there.keys(), key=lambda each: abs(each - level))
                return there[level] * (here[shared[0]] / there[shared[0]] if shared else 1.0)
        known = sorted({level for levels in self.measured.values() for level in levels})
        if not known:
            raise ValueError("no step was measured")
        below = max((each for each in known if each < level), default=known[0])
        above = min((each for each in known if each > level), default=known[-1])
        low, high = self.estimate(below, load), self.estimate(above, load)
        return low + (high - low) * (level - below) / max(above - below, 1)

    def _quickest(self, load: Load) -> dict[int, float]:
        return {level: min(steps) for level, steps in self.measured.get(load, {}).items()}


class AdaptiveDraft:
    """Chooser of the number of drafted tokens (the level) of each step.

    Args:
        levels: Numbers of drafted tokens to choose from, above 0; none is always a choice.
    """

    def __init__(self, levels: tuple[int, ...]) -> None:
        self.levels = (0, *sorted(levels))
        self.costs = Costs()
        self.forget_acceptance()
        # The longest draft and none, to begin with: what lies between is estimated.
        self._probed.extend([0] * FIRST_STEPS)
        # Expected tokens of a verification with this step's requests, by level.
        self._tokens: list[float] = []
        # Seconds that probes may still cost.
        self._credit = 0.0

    def forget_acceptance(self) -> None:
        """Start over with the longest draft, since draft or target changed; costs stay known."""
        self.acceptance = Acceptance(self.levels[-1])
        self._level = self.levels[-1]
        self._probed = deque([self._level] * FIRST_STEPS)

    def choose(self, requests: Sequence[str], mean_tokens: float) -> int:
        """Return the number of tokens to draft in a step, the same for all of its requests.

        Args:
            requests: Requests of the step.
            mean_tokens: Mean tokens of a request, prompt and answer.
        """
        load = load_of(len(requests), mean_tokens)
        self._tokens = self.acceptance.tokens(requests)
        # A long prompt may take more steps than are measured first, and those of prompts are not.
        if not self._probed and self.costs.measured:
            best = max(self.levels, key=lambda level: self._speed(level, load))
            if self._speed(best, load) > (1 + MARGIN) * self._speed(self._level, load):
                self._level = best
            self._probed.extend(self._probe(load))
        return self._probed.popleft() if self._probed else self._level

    def observe(
        self,
        verified: int,
        drafted: int,
        num_reqs: int,
        mean_tokens: float,
        seconds: float,
        accepted: Mapping[str, int],
    ) -> None:
        """Record a step.

        Args:
            verified: Level of what it verified.
            drafted: Level that it drafted for the next one.
            num_reqs: Requests of the step.
            mean_tokens: Mean tokens of a request, as in :meth:`choose`.
            seconds: Duration of the step.
            accepted: Number of accepted tokens of each request's draft that the step verified.
        """
        load = load_of(num_reqs, mean_tokens)
        if accepted:
            self.acceptance.observe(verified, accepted)
        if verified == drafted:
            self.costs.observe(verified, load, seconds)
        self._credit = min(self._credit + PROBING * seconds, SAVED_STEPS * seconds)
        if not self._level:
            # What a probe gains it may spend: one that goes well is followed by the next.
            self._credit += sum(accepted.values()) / num_reqs * self.costs.estimate(0, load)

    def _speed(self, level: int, load: Load) -> float:
        return self._tokens[level] / self.costs.estimate(level, load)

    def _probe(self, load: Load) -> list[int]:
        """Return the levels of the next steps if these are to probe costs or acceptance."""
        ours = self.costs.estimate(self._level, load)
        if self._level:
            if self._speed(self._level, load) > CLEARLY * self._speed(0, load):
                return []
            probed = 0
        else:
            # The shortest draft that would pay if all of it were accepted.
            paying = (
                level
                for level in self.levels[1:]
                if (level + 1) * ours > (1 + MARGIN) * self.costs.estimate(level, load)
            )
            probed = next(paying, 0)
            if not probed:
                return []
        # A probe may give no token but the target's own.
        seconds = self.costs.estimate(probed, load)
        loss = PROBE_STEPS * (seconds - ours / self._tokens[self._level])
        needed = loss
        if not probed and 0 in self.costs.measured.get(load, {}):
            # Once more, lest a cost stand that was measured on a bad day: at the price of a step at
            # least, and with as much left as probes of drafts need once none are drafted.
            loss = max(loss, ours)
            needed = loss + SAVED_STEPS / 2 * ours
        if self._credit < needed:
            return []
        self._credit -= loss
        return [probed] * PROBE_STEPS


def load_of(num_reqs: int, mean_tokens: float) -> Load:
    """Return the class of a step's load: steps of one class cost about the same."""
    return (max(num_reqs, 1) - 1).bit_length(), (max(int(mean_tokens), 1) - 1).bit_length()
