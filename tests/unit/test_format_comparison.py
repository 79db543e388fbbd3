"""The arithmetic behind ``evaluate.py --compare``."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example as tried
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.quantized import example


@pytest.fixture(scope="module")
def comparison():
    return example("checkpoints/format_comparison")


def distribution(logits: torch.Tensor) -> dict[int, float]:
    return dict(enumerate(logits.double().log_softmax(-1).tolist()))


@given(st.integers(0, 10**6), st.integers(2, 40))
# What the top tokens leave is a millionth there.
@tried(416, 4)
@settings(deadline=None, max_examples=40)
def test_divergence_is_torchs(seed, vocab_size):
    """With every token listed it is the KL; with some, at most that."""
    divergence = example("checkpoints/format_comparison").divergence
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, vocab_size, generator=generator, dtype=torch.float64) * 3
    expected = torch.nn.functional.kl_div(
        q.log_softmax(-1), p.log_softmax(-1), reduction="sum", log_target=True
    ).item()
    listed_p, listed_q = distribution(p), distribution(q)
    assert divergence(listed_p, listed_q) == pytest.approx(expected, abs=1e-9)
    top = dict(sorted(listed_p.items(), key=lambda item: -item[1])[: vocab_size // 2 + 1])
    assert divergence(top, listed_q) <= expected + 1e-9


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
