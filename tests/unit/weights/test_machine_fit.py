"""What cannot be served on a machine is refused before anything is loaded: formats, old and small
GPUs. The limits are lower bounds of what is needed.
"""

import functools
import json
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.platforms
import vllm.transformers_utils.config
from safetensors.torch import load_file
from vllm.platforms.interface import DeviceCapability

from benchmarks.memory_limit import is_quantized
from tests.support.engines.vllm_configs import configure, vllm_config
from tests.support.models.checkpoints import SHIPPED, benchmark_config, write_headers
from tests.support.models.integer_formats import LAYOUTS, integer_checkpoint, quantization_config
from vllm_diffusion.families.diffusion_gemma.startup import DiffusionGemmaTensors
from vllm_diffusion.weights.formats import read_format
from vllm_diffusion.weights.machine_fit import (
    check_capability,
    check_emulation,
    check_platform,
    check_room,
    weight_bytes,
)

pytestmark = pytest.mark.engine

GIB = 2**30
TENSORS = DiffusionGemmaTensors()
FORMATS = ("fp8-dynamic", "nvfp4", "nvfp4-weights", "nvfp4-modelopt")


def big_config() -> Any:
    from transformers import DiffusionGemmaConfig

    return DiffusionGemmaConfig.from_dict(benchmark_config("26b"))


@pytest.fixture(scope="module")
def big_shapes():
    return TENSORS.shapes(big_config())


def test_number_of_tensors(big_shapes):
    """The 26B checkpoint's 1,047 tensors and 51.65 GB are those of its parts."""
    assert len(big_shapes) == 1047
    parts = {
        "model.decoder.self_conditioning.": 4,
        "model.decoder.": 661,
        "model.encoder.language_model.": 30,
        "model.encoder.vision_tower.": 355,
        "model.encoder.embed_vision.": 1,
    }
    for prefix, count in parts.items():
        assert sum(name.startswith(prefix) for name in big_shapes) == count, prefix
    assert round(2 * sum(map(prod, big_shapes.values())) / 1e9, 2) == 51.65


def test_a_configuration_without_pictures(big_shapes):
    """A configuration without pictures implies the same tensors of the text model."""
    config = big_config()
    config.vision_config = None
    shapes = TENSORS.shapes(config)
    assert config.vision_config is None

    def text_of(shapes: dict[str, Any]) -> dict[str, Any]:
        return {name: shape for name, shape in shapes.items() if name.startswith("model.decoder.")}

    assert text_of(shapes) == text_of(big_shapes)


def pattern_of(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)


def test_every_name_pattern_is_one_that_loads(big_shapes):
    """Each pattern of the 1,047 names occurs in the shipped checkpoint, which is served."""
    patterns = {pattern_of(name) for name in big_shapes}
    shipped = {
        pattern_of(TENSORS.canonical_name(name))
        for name in load_file(SHIPPED / "model.safetensors")
    }
    assert patterns == shipped


@pytest.mark.parametrize("name", FORMATS)
def test_each_module_is_as_the_config_says(name, big_shapes):
    """Experts are quantized; routers, self-conditioning and the vision tower are not."""
    ignored = benchmark_config(name)["ignore"]
    layer = "model.decoder.layers.3."
    assert is_quantized(TENSORS.all_names(layer + "experts.7.up_proj"), ignored)
    assert is_quantized(TENSORS.all_names(layer + "self_attn.q_proj"), ignored) == (
        name != "nvfp4-modelopt"
    )
    kept = ("model.decoder.self_conditioning.gate_proj", layer + "router.proj", "lm_head")
    tower = "model.encoder.vision_tower.encoder.layers.0.mlp.up_proj.linear"
    assert not any(is_quantized(TENSORS.all_names(module), ignored) for module in (*kept, tower))


@pytest.mark.parametrize(
    ("platform", "is_served"),
    [({"is_cuda": True}, True), ({"is_rocm": True}, True), ({"name": "cpu"}, False)],
    ids=str,
)
def test_fp4_where_nothing_can_run_it(platform, is_served, monkeypatch):
    """FP4 is refused on vLLM's compiled CPU build, which cannot run it."""
    fake = SimpleNamespace(
        is_cuda=lambda: platform.get("is_cuda", False),
        is_rocm=lambda: platform.get("is_rocm", False),
        device_name=platform.get("name", "cuda"),
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", fake)
    fp4 = read_format(benchmark_config("nvfp4"))
    fp8 = read_format(benchmark_config("fp8-dynamic"))
    check_platform("m", fp8)
    if is_served:
        check_platform("m", fp4)
        return
    with pytest.raises(ValueError, match="can neither run nor emulate"):
        check_platform("m", fp4)


def mixed() -> dict[str, Any]:
    """Return a config with a group that the CPU emulates and one that it does not."""
    settings = quantization_config("W4A16", [])
    fp8 = benchmark_config("fp8-dynamic")["config_groups"]["group_0"]
    settings["config_groups"]["group_1"] = fp8 | {"format": "float-quantized"}
    return settings


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        *((quantization_config(layout, []), "not emulated on the CPU") for layout in LAYOUTS),
        (mixed(), "pack-quantized, which is not emulated"),
        *((benchmark_config(name), None) for name in ("fp8-dynamic", "nvfp4", "nvfp4-modelopt")),
    ],
)
def test_formats_that_the_cpu_emulates(settings, problem):
    """A format that the CPU does not emulate is refused, also in one of several groups, even if
    vLLM would load it.
    """
    if problem is None:
        check_emulation("m", settings)
        return
    with pytest.raises(ValueError, match=problem):
        check_emulation("m", settings)


@pytest.mark.parametrize("architecture", ["SDARForCausalLM", "Qwen3ForCausalLM"])
def test_integer_weights_are_refused_before_they_are_loaded(architecture, tmp_path):
    """Integer weights are refused before loading, of a diffusion model or an ordinary one."""
    folder = integer_checkpoint(SHIPPED.parent / "tiny_sdar", tmp_path / "gptq", "gptq")
    config = json.loads((folder / "config.json").read_text())
    if not architecture.startswith("SDAR"):
        config |= {"architectures": [architecture], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantised as gptq, which is not emulated on the CPU"):
        configure(folder)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function for the configuration of the 26B shape, by its format."""

    @functools.cache
    def folder(weights: str) -> Path:
        path: Path = tmp_path_factory.mktemp("shape") / weights
        path.mkdir()
        config = benchmark_config("26b")
        if weights != "bf16":
            config["quantization_config"] = benchmark_config(weights)
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
