"""Tests of back ends that were measured to be faster on a card, and of the operator's choice."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.engines.vllm_configs import configure
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.startup import engine_config, measured_backends
from vllm_diffusion.startup.measured_backends import MeasuredBackend, choose_backends, format_of

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[3]
FP8 = json.loads((ROOT / "benchmarks/configs/fp8-dynamic.json").read_text())
SOURCE = "benchmarks/gpu/results/x/products-humming.json, experts"
HUMMING = MeasuredBackend(
    "float-quantized, channel", (9, 0), "NVIDIA H200", "moe", "humming", 0.8, 0.95, SOURCE
)
TORCH = replace(HUMMING, products="linear", backend="torch")


def chosen(
    monkeypatch: pytest.MonkeyPatch,
    *rows: MeasuredBackend,
    card: str = "NVIDIA H200",
    quantization: dict[str, Any] | None = FP8,
    **given: Any,
) -> tuple[str, str]:
    """Return the back ends of experts and linear layers after a start on a card with a table."""
    from vllm import platforms
    from vllm.config.kernel import KernelConfig

    platform = SimpleNamespace(
        is_cuda=lambda: True,
        get_device_name=lambda: card,
        get_device_capability=lambda: (9, 0),
    )
    monkeypatch.setattr(platforms, "current_platform", platform)
    monkeypatch.setattr(measured_backends, "MEASURED", rows)
    arch = SimpleNamespace(quantization_config=quantization)
    model = SimpleNamespace(model_arch_config=arch, dtype="torch.bfloat16")
    config = SimpleNamespace(kernel_config=KernelConfig(**given), model_config=model)
    choose_backends(config)
    return config.kernel_config.moe_backend, config.kernel_config.linear_backend


def test_what_was_measured_faster_is_taken(monkeypatch, caplog):
    """Experts and linear layers get the faster back ends, which one log line names."""
    with caplog.at_level(logging.INFO, logger="vllm.vllm_diffusion"):
        assert chosen(monkeypatch, HUMMING, TORCH) == ("humming", "torch")
    named = [record for record in caplog.records if record.name == "vllm.vllm_diffusion"]
    (message,) = (record.getMessage() for record in named)
    assert message.count(SOURCE) == 2
    assert "--moe-backend humming" in message
    assert "--linear-backend torch" in message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"moe_backend": "cutlass"}, ("cutlass", "torch")),
        ({"linear_backend": "cutlass"}, ("humming", "cutlass")),
        ({"linear_backend_per_quant": {"fp8": "cutlass"}}, ("humming", "auto")),
    ],
)
def test_the_operator_s_back_end_wins(monkeypatch, given, expected):
    """A back end that the operator names stays, and the other is chosen from the table."""
    assert chosen(monkeypatch, HUMMING, TORCH, **given) == expected


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"card": "NVIDIA H100 80GB HBM3"},
        {"quantization": None},
        {"row": replace(HUMMING, at_256=0.91)},
        {"row": replace(HUMMING, at_2048=1.01)},
        {"row": replace(HUMMING, capability=(10, 0))},
    ],
)
def test_vllm_chooses_where_nothing_pays(monkeypatch, elsewhere):
    """vLLM chooses for another card or format, and if no back end is faster enough."""
    row = elsewhere.pop("row", HUMMING)
    assert chosen(monkeypatch, row, **elsewhere) == ("auto", "auto")


def test_a_start_asks_the_table(monkeypatch):
    """A start of a diffusion model applies the table before its configuration is final."""
    monkeypatch.setattr(
        engine_config,
        "choose_backends",
        lambda config: setattr(config.kernel_config, "moe_backend", "triton"),
    )
    assert configure(shipped_checkpoint()).kernel_config.moe_backend == "triton"


def test_formats_are_told_apart():
    """The name of a format contains the part of a weight that shares a scale."""
    for name in ("fp8-dynamic", "nvfp4"):
        settings = json.loads((ROOT / f"benchmarks/configs/{name}.json").read_text())
        arch = SimpleNamespace(quantization_config=settings)
        found = format_of(SimpleNamespace(model_arch_config=arch))
        wanted = {"fp8-dynamic": "float-quantized, channel"}.get(name, "nvfp4-pack-quantized")
        assert found.startswith(wanted)


def test_every_row_of_the_table_pays_and_has_a_kept_source():
    """Every row of the table is faster and has a result that is kept in the repository."""
    for row in measured_backends.MEASURED:
        assert row.pays, row
        assert (ROOT / row.source.partition(",")[0]).is_file(), row
