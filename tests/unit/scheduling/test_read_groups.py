"""Reads of one decision wait for one another, and never for long."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_diffusion.requests.arguments import ReadGroup, RequestArguments, attach_arguments
from vllm_diffusion.scheduling.features import PATIENCE, ReadGroups

pytestmark = pytest.mark.engine


def read(name: str, *group: Any) -> Any:
    """A request, with the name of its group and the number of reads in it."""
    params = SimpleNamespace(extra_args=None)
    attach_arguments(params, RequestArguments(read_group=ReadGroup(*group) if group else None))
    return SimpleNamespace(request_id=name, sampling_params=params)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, to be moved."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_until_the_last_has_come(clock):
    """Others wait for nobody, and a read that is alone does not either."""
    groups = ReadGroups()
    for one in (read("a0", "a", 3), read("b0", "b", 1), read("c"), read("a1", "a", 3)):
        groups.add_request(one)
    held = {name: groups.holds(name) for name in ("a0", "a1", "b0", "c", "unheard of")}
    assert held == {"a0": True, "a1": True, "b0": False, "c": False, "unheard of": False}
    groups.add_request(read("a2", "a", 3))
    assert not any(groups.holds(f"a{i}") for i in range(3))
    for name in ("a0", "a1", "a2", "b0", "c"):
        groups.remove_request(name)
    assert not groups._groups
    assert not groups._group_of


def test_no_longer_than_patience(clock):
    """One never comes, or late: it finds the others gone ahead, and waits for nobody."""
    groups = ReadGroups()
    groups.add_request(read("a0", "a", 3))
    clock[0] += PATIENCE - 0.01
    groups.add_request(read("a1", "a", 3))
    assert groups.holds("a0")
    assert groups.holds("a1")
    clock[0] += PATIENCE - 0.01
    assert groups.holds("a0")
    clock[0] += 0.02
    assert not groups.holds("a0")
    assert not groups.holds("a1")
    groups.add_request(read("a2", "a", 3))
    assert not groups.holds("a2")
