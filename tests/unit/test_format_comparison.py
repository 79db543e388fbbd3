"""The arithmetic behind ``evaluate.py --compare``."""

from __future__ import annotations

import math

import pytest

from tests.support.quantized import example


@pytest.fixture(scope="module")
def comparison():
    return example("checkpoints/format_comparison")


def test_recovery(comparison):
    """The ratio of right answers, and an interval that narrows where the answers agree."""
    base = [True] * 90 + [False] * 10
    assert comparison.recovery(base, base) == (100, 100, 100)
    worse = [True] * 81 + [False] * 19
    percent, low, high = comparison.recovery(base, worse)
    assert percent == pytest.approx(90)
    # The same from the normal approximation of 9 lost of 90.
    width = 1.96 * 100 * math.sqrt(0.1 * 0.9 / 90)
    assert (low, high) == pytest.approx((90 - width, 90 + width), abs=1.5)


def test_table(comparison):
    """Each checkpoint has its line, and what is compared with the first one is right."""
    same, other = {0: math.log(0.9), 1: math.log(0.1)}, {0: math.log(0.2), 1: math.log(0.8)}
    base = comparison.FormatRun("original", [True, True], 2.0, [[same, same]])
    run = comparison.FormatRun("fp8", [True, False], 2.5, [[same, other]])
    first, second = comparison.table([base, run]).splitlines()
    assert "100.0%" in first
    assert "recovery" not in first
    kl = (0.9 * math.log(0.9 / 0.2) + 0.1 * math.log(0.1 / 0.8)) / 2
    assert f"same argmax 50.0%, KL {kl:.4f} nats" in second
    assert "steps/canvas 2.50" in second
    assert "recovery 50.0 %" in second
