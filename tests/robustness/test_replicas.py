"""The soak over two servers, shortened: each of them is killed once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.robustness.replicas import soak

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]


def test_short_soak(tmp_path: Path) -> None:
    """Every request is answered with its tokens, and servers and adapters did come and go."""
    counts, wrong = soak(minutes=3, kill_every=30, seed=2, folder=tmp_path)
    assert not wrong
    assert counts["killed"] >= 2
    assert counts["adapters unloaded"] > 0
    assert min(counts["answered by the model"], counts["answered by an adapter"]) > 20
