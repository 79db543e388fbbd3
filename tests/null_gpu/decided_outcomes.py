"""Outcomes for a server on the null GPU: ``--worker-extension-cls`` has its workers import this."""

from __future__ import annotations

from tests.null_gpu.engine_cases import decide_outcomes

decide_outcomes()


class DecidedOutcomes:
    """Base that a worker is given, which adds nothing to it."""
