"""The checks of kernels accept right kernels in Triton's interpreter, and find wrong ones."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from attention_kernels import checks
from attention_kernels.checks import AttentionShape, RowsShape
from attention_kernels.vocab_statistics import RunningStatistics

CPU = torch.device("cpu")
LAYER = AttentionShape(2, 1, 32, 15, ((16, 8), (8, 0)), 21, dtype="float32")
ROWS = RowsShape(3, 300, 128, dtype="float32", adjusted=True)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("changes", [{}, {"span": 8}, {"window": -1, "softcap": 20.0}])
def test_attention(impl, changes):
    """The check of attention accepts every right implementation and kind of layer."""
    found = checks.check_attention(replace(LAYER, **changes), impl, CPU)
    assert 0 < found.difference < 1e-5
    found.call()


def test_an_fp8_cache():
    """The check of attention accepts a right kernel on an FP8 cache."""
    found = checks.check_attention(replace(LAYER, is_fp8=True), "triton", CPU)
    assert found.difference < 1e-5


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("adjusted", [True, False])
def test_rows(impl, adjusted):
    """The checks of statistics and kept rows accept every right implementation."""
    rows = replace(ROWS, adjusted=adjusted)
    assert checks.check_statistics(rows, impl, CPU).difference < 1e-5
    assert checks.check_kept_rows(rows, impl, CPU).difference < 1e-5


def test_noise_and_device():
    """The checks of the noise and of the device find no difference on a CPU."""
    assert checks.check_noise(CPU).difference == 0
    assert checks.check_device(CPU).difference == 0


def wrong_in_triton(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, spoil: Callable[..., Any]
) -> None:
    """Replace a function's Triton implementation by a wrong one."""
    right = getattr(module, name)

    def function(*arguments: Any, impl: str, **options: Any) -> Any:
        result = right(*arguments, impl="reference", **options)
        return spoil(result, *arguments) if impl == "triton" else result

    monkeypatch.setattr(module, name, function)


@pytest.mark.parametrize(
    "spoil", [lambda out: out * 1.01, lambda out: out.masked_fill(out > 1, torch.nan)]
)
def test_wrong_attention(monkeypatch, spoil):
    """The check of attention finds a wrong kernel."""
    wrong_in_triton(monkeypatch, checks.attention, "canvas_attention", lambda out, *_: spoil(out))
    with pytest.raises(AssertionError, match="attention: "):
        checks.check_attention(LAYER, "triton", CPU)


def spoilt(field: str) -> Callable[..., None]:
    def spoil(_: None, running: RunningStatistics, *__: Any) -> None:
        values = getattr(running, field)
        values.copy_(values + 1)

    return spoil


@pytest.mark.parametrize("field", ["total", "weighted", "argmax", "best", "candidate"])
def test_wrong_statistics(monkeypatch, field):
    """The check of statistics finds an error in each number that a step reads."""
    wrong_in_triton(monkeypatch, checks.sampled_rows, "update_statistics", spoilt(field))
    with pytest.raises(AssertionError):
        checks.check_statistics(ROWS, "triton", CPU)


def test_wrong_soft_embeddings(monkeypatch):
    """The check of statistics finds wrong soft embeddings."""
    right = checks.sampled_rows.add_product

    def wrong(soft: torch.Tensor, *rest: Any, impl: str) -> None:
        right(soft.add_(1e-2) if impl == "triton" else soft, *rest, impl=impl)

    monkeypatch.setattr(checks.sampled_rows, "add_product", wrong)
    with pytest.raises(AssertionError, match="soft embedding: "):
        checks.check_statistics(ROWS, "triton", CPU)


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("largest_logit", lambda out, *_: out + 1e-2),
        ("scaled_logits", lambda out, *_: out + 1e-2),
        ("weigh", lambda out, *_: out + 1),
        ("largest_key", lambda out, *_: out + 2**16),
        ("draw", lambda out, *_: out._replace(candidate=out.candidate + 1)),
        ("draw", lambda out, *_: out._replace(mass=out.mass * 1.01)),
    ],
)
def test_wrong_kept_rows(monkeypatch, name, spoil):
    """The check of kept rows finds an error in each of its functions."""
    wrong_in_triton(monkeypatch, checks.sampled_rows, name, spoil)
    with pytest.raises(AssertionError):
        checks.check_kept_rows(ROWS, "triton", CPU)


def test_wrong_noise(monkeypatch):
    """The check of the noise finds words that differ from the host's."""
    right, calls = checks.device.random_words, []

    def words(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return right(*arguments) ^ (len(calls) == 1)

    monkeypatch.setattr(checks.device, "random_words", words)
    with pytest.raises(AssertionError, match="other words than on the host"):
        checks.check_noise(CPU)
