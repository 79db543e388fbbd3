"""Outcome of a check."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Checked(NamedTuple):
    """A kernel that is right.

    Attributes:
        difference: Largest difference from float64, in the unit of the output.
        call: Runs the kernel once more, for a clock.
    """

    difference: float
    call: Callable[[], object]
