"""Tests of the tensors that a configuration implies, and of what a platform cannot run."""

import json
import re
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from benchmarks.memory_limit import is_quantized
from tests.support.engines.vllm_configs import configure
from tests.support.models.checkpoints import SHIPPED
from tests.support.models.integer_formats import LAYOUTS, integer_checkpoint, quantization_config
from vllm_diffusion.families.diffusion_gemma.startup import DiffusionGemmaTensors
from vllm_diffusion.weights.formats import read_format
from vllm_diffusion.weights.machine_fit import check_emulation, check_platform

CONFIGS = Path(__file__).resolve().parents[3] / "benchmarks" / "configs"
TENSORS = DiffusionGemmaTensors()
FORMATS = ("fp8-dynamic", "nvfp4", "nvfp4-weights", "nvfp4-modelopt")


def config_of(path: Path) -> Any:
    from transformers import DiffusionGemmaConfig

    return DiffusionGemmaConfig.from_dict(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def big_shapes():
    return TENSORS.shapes(config_of(CONFIGS / "26b.json"))


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
    config = config_of(CONFIGS / "26b.json")
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
    ignored = json.loads((CONFIGS / f"{name}.json").read_text())["ignore"]
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
    import vllm.platforms

    fake = SimpleNamespace(
        is_cuda=lambda: platform.get("is_cuda", False),
        is_rocm=lambda: platform.get("is_rocm", False),
        device_name=platform.get("name", "cuda"),
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", fake)
    fp4 = read_format(json.loads((CONFIGS / "nvfp4.json").read_text()))
    fp8 = read_format(json.loads((CONFIGS / "fp8-dynamic.json").read_text()))
    check_platform("m", fp8)
    if is_served:
        check_platform("m", fp4)
        return
    with pytest.raises(ValueError, match="can neither run nor emulate"):
        check_platform("m", fp4)


def settings_of(name: str) -> Any:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def mixed() -> dict[str, Any]:
    """Return a config with a group that the CPU emulates and one that it does not."""
    settings = quantization_config("W4A16", [])
    fp8 = settings_of("fp8-dynamic")["config_groups"]["group_0"]
    settings["config_groups"]["group_1"] = fp8 | {"format": "float-quantized"}
    return settings


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        *((quantization_config(layout, []), "not emulated on the CPU") for layout in LAYOUTS),
        (mixed(), "pack-quantized, which is not emulated"),
        *((settings_of(name), None) for name in ("fp8-dynamic", "nvfp4", "nvfp4-modelopt")),
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
