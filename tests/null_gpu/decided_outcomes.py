"""Decides outcomes for a server on the null GPU, whose workers import this as an extension."""

from tests.null_gpu.engine_cases import decide_outcomes

decide_outcomes()


class DecidedOutcomes:
    """A base class for workers that adds nothing to them."""
