"""A GPU that is too old or too small is refused before anything is loaded.

The limits are lower bounds of what is needed.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
import vllm.transformers_utils.config
from vllm.platforms.interface import DeviceCapability

from tests.support.engines.vllm_configs import vllm_config
from tests.support.models.checkpoints import write_headers
from vllm_diffusion.weights.machine_fit import check_capability, check_room, weight_bytes

pytestmark = pytest.mark.engine

GIB = 2**30
CONFIGS = Path(__file__).resolve().parents[3] / "benchmarks/configs"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function for the configuration of the 26B shape, by its format."""

    @functools.cache
    def folder(weights: str) -> Path:
        path: Path = tmp_path_factory.mktemp("shape") / weights
        path.mkdir()
        config = json.loads((CONFIGS / "26b.json").read_text())
        if weights != "bf16":
            config["quantization_config"] = json.loads((CONFIGS / f"{weights}.json").read_text())
        (path / "config.json").write_text(json.dumps(config))
        return write_headers(path)

    return lambda weights: _configuration(folder(weights))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Simulate an RTX 4090, as vLLM's platform reports it."""
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        get_device_capability=lambda: DeviceCapability(8, 9),
        get_device_name=lambda: "RTX 4090",
        get_device_total_memory=lambda: int(23.5 * GIB),
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", platform)
    return platform


def _configuration(folder: Path) -> Any:
    config = vllm_config()
    config.model_config.model, config.model_config.dtype = str(folder), torch.bfloat16
    config.cache_config.kv_cache_memory_bytes = None
    return config


@pytest.mark.parametrize(
    ("weights", "gib"),
    # By the sizes of the published files, less the vision tower's 1.07 GiB: 51.65 GB, 27.20 GB and
    # 18.82 GB.
    [("bf16", 47.03), ("fp8-dynamic", 24.26), ("nvfp4-modelopt", 16.46)],
)
def test_weight_bytes(weights, gib, published):
    """The bytes of the weights are computed right for each format."""
    assert weight_bytes(published(weights).model_config) / GIB == pytest.approx(gib, abs=0.01)


def test_a_model_of_the_hub(monkeypatch):
    """A Hub model's headers are read as by vLLM; if that fails, nothing is refused."""
    described = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    described["p"] = {"dtype": "U8", "shape": [2, 3], "data_offsets": [24, 30]}
    answers = iter([described, {}])
    monkeypatch.setattr(
        vllm.transformers_utils.config,
        "get_safetensors_params_metadata",
        lambda model, revision: next(answers),
    )
    model = _configuration(Path("somebody/on-the-hub")).model_config
    assert weight_bytes(model) == 18
    assert weight_bytes(model) == 0


@pytest.mark.parametrize(
    ("weights", "changes", "refusal"),
    [
        ("fp8-dynamic", {}, r"weights take 24\.3 GiB .* 23\.5 GiB, of which .* 21\.6 "),
        ("nvfp4-modelopt", {}, None),
        ("fp8-dynamic", {"parallel_config": {"tensor_parallel_size": 2}}, None),
        (
            "fp8-dynamic",
            {"parallel_config": {"data_parallel_size": 2, "enable_expert_parallel": True}},
            None,
        ),
        # How much moves to the host is unknown.
        ("fp8-dynamic", {"offload_config": {"uva": SimpleNamespace(cpu_offload_gb=10)}}, None),
        # Weights that are quantized while loading count half of their size in the file.
        ("bf16", {}, r"weights take 47\.0 GiB"),
        ("bf16", {"model_config": {"quantization": "fp8_per_tensor"}}, None),
    ],
    ids=str,
)
def test_room(weights, changes, refusal, gpu, published):
    """Weights that do not fit on the GPU, or on several, are refused with their size and the
    GPU's.
    """
    config = published(weights)
    for part, values in changes.items():
        vars(getattr(config, part)).update(values)
    if refusal is None:
        check_room(config)
        return
    with pytest.raises(ValueError, match=refusal):
        check_room(config)


def test_a_share_that_does_not_count(gpu, published):
    """The share of memory for vLLM does not count if the size of the cache is given."""
    gpu.get_device_total_memory = lambda: 25 * GIB
    config = published("fp8-dynamic")
    with pytest.raises(ValueError, match=r"has 25\.0 GiB, of which vLLM may take 23\.0"):
        check_room(config)
    config.cache_config.kv_cache_memory_bytes = GIB // 4
    check_room(config)


def test_an_old_gpu(gpu):
    """A GPU of compute capability below 8.0 is refused by name."""
    check_capability()
    gpu.get_device_capability = lambda: DeviceCapability(7, 5)
    with pytest.raises(ValueError, match=r"RTX 4090\) has compute capability 7\.5, .* need 8\.0"):
        check_capability()
