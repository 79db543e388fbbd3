"""Tests of how functions and values of vLLM's are replaced."""

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


@replaces("engine:Runner.sample", reason="Test.", until="Test.")
def adding(stock: Callable[..., int], addend: int) -> Callable[..., int]:
    def sample(self: Any, *args: Any, **kwargs: Any) -> int:
        return stock(self, *args, **kwargs) + addend

    return sample


@replaces_call("engine:Runner.sample", reason="Test.", until="Test.")
def adding_to_call(stock: Callable[..., int], addend: int, self: Any, rows: int = 0) -> int:
    return stock(self, rows) + addend


@pytest.mark.parametrize("replacement", [adding, adding_to_call], ids=["method", "call"])
def test_install_twice(replacement: Any, engine: Any) -> None:
    """A replacement is installed once, gets vLLM's method, the values of its installation and the
    call's arguments, and shows the signature of the original.
    """
    for _ in range(2):
        replacement.install(5)
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
