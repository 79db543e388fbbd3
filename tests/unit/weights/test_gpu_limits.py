"""A GPU that is too old or too small is refused from the configuration alone, by lower bounds of what is needed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
from transformers import DiffusionGemmaConfig
from vllm.platforms.interface import DeviceCapability

from vllm_diffusion.families.diffusion_gemma.startup import DiffusionGemmaTensors
from vllm_diffusion.weights import check
from vllm_diffusion.weights.check import check_capability, check_room, described_specs, weight_bytes
from vllm_diffusion.weights.formats import FLOATS

pytestmark = pytest.mark.engine

GIB = 2**30
CONFIGS = Path(__file__).resolve().parents[3] / "benchmarks/configs"
RULES = DiffusionGemmaTensors()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An RTX 4090, as vLLM's platform reports it."""
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        get_device_capability=lambda: DeviceCapability(8, 9),
        get_device_name=lambda: "RTX 4090",
        get_device_total_memory=lambda: int(23.5 * GIB),
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", platform)
    return platform


def published(weights: str, **parallel: Any) -> Any:
    """What the check reads of the configuration of the 26B shape."""
    config = DiffusionGemmaConfig.from_dict(json.loads((CONFIGS / "26b.json").read_text()))
    quantization = (
        None if weights == "bf16" else json.loads((CONFIGS / f"{weights}.json").read_text())
    )
    ranks = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=config,
            dtype=torch.bfloat16,
            model_arch_config=SimpleNamespace(quantization_config=quantization),
        ),
        parallel_config=SimpleNamespace(**(ranks | parallel)),
        cache_config=SimpleNamespace(gpu_memory_utilization=0.92, kv_cache_memory_bytes=None),
        offload_config=SimpleNamespace(
            uva=SimpleNamespace(cpu_offload_gb=0), prefetch=SimpleNamespace(offload_group_size=0)
        ),
    )


@pytest.mark.parametrize(
    ("weights", "gib"),
    # By the sizes of the published files, less the vision tower's 1.07 GiB: 51.65 GB, 27.20 GB and 18.82 GB.
    [("bf16", 47.03), ("fp8-dynamic", 24.26), ("nvfp4-modelopt", 16.46)],
)
def test_weight_bytes(weights, gib):
    model = published(weights).model_config
    quantization = model.model_arch_config.quantization_config
    found = weight_bytes(described_specs(model.hf_config, RULES, quantization), 2)
    assert found / GIB == pytest.approx(gib, abs=0.01)


def test_an_unknown_format_counts_nothing():
    """vLLM may know how small it is."""
    config = published("bf16").model_config.hf_config
    assert weight_bytes(described_specs(config, RULES, {"quant_method": "awq"}), 2) == 0


def test_weights_that_do_not_fit(gpu):
    with pytest.raises(
        ValueError, match=r"weights take 24\.3 GiB .* 23\.5 GiB, of which .* 21\.6 "
    ):
        check_room(published("fp8-dynamic"), RULES)


@pytest.mark.parametrize(
    "serves",
    [
        published("nvfp4-modelopt"),
        published("fp8-dynamic", tensor_parallel_size=2),
        published("fp8-dynamic", data_parallel_size=2, enable_expert_parallel=True),
    ],
)
def test_weights_that_fit(gpu, serves):
    check_room(serves, RULES)


def test_tensors_that_were_compared(gpu, monkeypatch):
    """They are not described a second time, which takes a second."""
    monkeypatch.setattr(check, "described_specs", None)
    compared = {"model.weight": (FLOATS, ((2**32, 3),))}
    with pytest.raises(ValueError, match=r"weights take 24\.0 GiB"):
        check_room(published("bf16"), RULES, compared)


def test_a_share_that_does_not_count(gpu):
    """24.3 GiB of weights on a GPU of 25, with a cache of a given size."""
    gpu.get_device_total_memory = lambda: 25 * GIB
    config = published("fp8-dynamic")
    with pytest.raises(ValueError, match=r"has 25\.0 GiB, of which vLLM may take 23\.0"):
        check_room(config, RULES)
    config.cache_config.kv_cache_memory_bytes = GIB // 4
    check_room(config, RULES)


def test_weights_that_move_to_the_host(gpu):
    """How many bytes stay on the GPU is not known then."""
    config = published("fp8-dynamic")
    config.offload_config.uva.cpu_offload_gb = 10
    check_room(config, RULES)


def test_an_old_gpu(gpu):
    check_capability()
    gpu.get_device_capability = lambda: DeviceCapability(7, 5)
    with pytest.raises(ValueError, match=r"RTX 4090\) has compute capability 7\.5, .* need 8\.0"):
        check_capability()
