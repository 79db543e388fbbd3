"""Reads of one decision wait for one another, and never for long."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.requests.read_together import READ_TOGETHER, parse_read_together
from vllm_diffusion.scheduling import reads_together
from vllm_diffusion.scheduling.reads_together import PATIENCE, ReadsTogether

pytestmark = pytest.mark.engine


def read(name: str, together: Any = None) -> Any:
    """A request."""
    extra_args = None if together is None else {READ_TOGETHER: together}
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=extra_args))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be moved."""
    now = [100.0]
    monkeypatch.setattr(reads_together.time, "monotonic", lambda: now[0])
    return now


def test_until_the_last_has_come(clock):
    """Others wait for nobody, and a read that is alone does not either."""
    reads = ReadsTogether()
    for one in (read("a0", ["a", 3]), read("b0", ["b", 1]), read("c"), read("a1", ["a", 3])):
        reads.add_request(one)
    held = {name: reads.holds(name) for name in ("a0", "a1", "b0", "c", "unheard of")}
    assert held == {"a0": True, "a1": True, "b0": False, "c": False, "unheard of": False}
    reads.add_request(read("a2", ["a", 3]))
    assert not any(reads.holds(f"a{i}") for i in range(3))
    for name in ("a0", "a1", "a2", "b0", "c"):
        reads.remove_request(name)
    assert not reads._groups
    assert not reads._group_of


def test_no_longer_than_patience(clock):
    """One never comes, or late: it finds the others gone ahead, and waits for nobody."""
    reads = ReadsTogether()
    reads.add_request(read("a0", ["a", 3]))
    clock[0] += PATIENCE - 0.01
    reads.add_request(read("a1", ["a", 3]))
    assert reads.holds("a0")
    assert reads.holds("a1")
    clock[0] += PATIENCE - 0.01
    assert reads.holds("a0")
    clock[0] += 0.02
    assert not reads.holds("a0")
    assert not reads.holds("a1")
    reads.add_request(read("a2", ["a", 3]))
    assert not reads.holds("a2")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
def test_what_is_no_mark(value):
    """Whatever a request says of it, it is read, or it is nothing."""
    found = parse_read_together({READ_TOGETHER: value})
    is_mark = (
        isinstance(value, list)
        and len(value) == 2
        and isinstance(value[0], str)
        and isinstance(value[1], int)
    )
    assert found == (tuple(value) if is_mark else None)
    assert parse_read_together(None) is None
