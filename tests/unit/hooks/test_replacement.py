"""Tests of how functions and values of vLLM's are replaced."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest

from vllm_diffusion.hooks.replacement import replaces, replaces_call


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return a module with a class and a value, importable as ``engine``."""
    module = types.ModuleType("engine")

    class Runner:
        def sample(self, rows: int) -> int:
            return rows

    module.Runner = Runner  # type: ignore[attr-defined]
    module.PREFIXES = ("a",)  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "engine", module)
    return module


def test_install_twice(engine: Any) -> None:
    """A replacement is installed once, calls the original, and shows its signature."""

    @replaces("engine:Runner.sample", reason="Test.", until="Test.")
    def adding(stock: Callable[..., int], addend: int) -> Callable[..., int]:
        def sample(self: Any, *args: Any) -> int:
            return stock(self, *args) + addend

        return sample

    for _ in range(2):
        adding.install(5)
        assert engine.Runner().sample(1) == 6
    assert list(inspect.signature(engine.Runner.sample).parameters) == ["self", "rows"]


def test_install_call_twice(engine: Any) -> None:
    """A replacement gets vLLM's method, the values of its installation and the call's arguments."""

    @replaces_call("engine:Runner.sample", reason="Test.", until="Test.")
    def adding(stock: Callable[..., int], addend: int, self: Any, rows: int = 0) -> int:
        assert isinstance(self, engine.Runner)
        return stock(self, rows) + addend

    for _ in range(2):
        adding.install(5)
        assert engine.Runner().sample(1) == engine.Runner().sample(rows=1) == 6
    assert list(inspect.signature(engine.Runner.sample).parameters) == ["self", "rows"]


def test_install_value_twice(engine: Any) -> None:
    """A value is replaced once, and again if vLLM's has been put back."""

    @replaces("engine:PREFIXES", reason="Test.", until="Test.")
    def longer(stock: tuple[str, ...]) -> tuple[str, ...]:
        return (*stock, "b")

    for _ in range(2):
        longer.install()
        assert engine.PREFIXES == ("a", "b")
    engine.PREFIXES = ("c",)
    longer.install()
    assert engine.PREFIXES == ("c", "b")
