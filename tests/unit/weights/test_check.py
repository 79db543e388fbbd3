"""A checkpoint that is not what its config says is refused by tensor and file, before loading."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import SHIPPED
from tests.support.quantized import quantized_checkpoint
from vllm_diffusion.families.diffusion_gemma.startup import DiffusionGemmaTensors
from vllm_diffusion.weights.check import check_checkpoint, check_platform, expected_specs
from vllm_diffusion.weights.formats import read_format
from vllm_diffusion.weights.tensor_rules import split_experts

CONFIGS = Path(__file__).resolve().parents[3] / "benchmarks" / "configs"
RULES = DiffusionGemmaTensors()
FORMATS = ("fp8-dynamic", "nvfp4", "nvfp4-weights", "nvfp4-modelopt")
BYTES = {"F8_E4M3": 1, "U8": 1, "F32": 4, "BF16": 2}


def config_of(path: Path) -> Any:
    from transformers import DiffusionGemmaConfig

    return DiffusionGemmaConfig.from_dict(json.loads(path.read_text()))


@pytest.fixture(scope="module")
def big_shapes():
    return RULES.shapes(config_of(CONFIGS / "26b.json"))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """The shipped checkpoint in three formats, by name."""
    folder = tmp_path_factory.mktemp("quantized")
    schemes = ("fp8-dynamic", "nvfp4", "fp8-static")
    return {
        scheme: quantized_checkpoint(folder / scheme, scheme, num_prompts=2) for scheme in schemes
    }


def check(folder: Path, tp: int = 1) -> None:
    settings = json.loads((folder / "config.json").read_text())
    check_checkpoint(
        str(folder),
        config_of(folder / "config.json"),
        RULES,
        settings.get("quantization_config"),
        tp,
    )


def refusal(folder: Path, tp: int = 1) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        check(folder, tp)
    message = str(raised.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def changed(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint with tensors changed in place."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    weights = load_file(source / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def reconfigured(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with its quantization config changed in place."""
    folder = changed(source, folder, lambda weights: None)
    settings = json.loads((folder / "config.json").read_text())
    change(settings["quantization_config"])
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def test_good_checkpoints(quantized):
    """What the bad cases change is good before the change."""
    check(SHIPPED)
    for folder in quantized.values():
        check(folder)
        check(folder, tp=2)
    check_checkpoint("somebody/on-the-hub", None, RULES, None, 1)


def test_number_of_tensors(big_shapes):
    """The 26B checkpoint's 1,047 tensors, by its parts, and its 51.65 GB."""
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


def pattern_of(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", name)


def test_every_name_pattern_is_one_that_loads(big_shapes):
    """Each pattern behind the 1,047 names is one of the shipped checkpoint, which is served."""
    patterns = {pattern_of(name) for name in big_shapes}
    shipped = {
        pattern_of(RULES.canonical_name(name)) for name in load_file(SHIPPED / "model.safetensors")
    }
    assert patterns == shipped


@pytest.mark.parametrize(
    ("name", "scale_bytes", "gigabytes"),
    [("fp8-dynamic", 2, 27.20), ("nvfp4-modelopt", 4, 18.82)],
)
def test_sizes_of_the_published_checkpoints(name, scale_bytes, gigabytes, big_shapes):
    """Our reading of the two published configs gives the sizes of their files.

    Their tensor names were not compared with the published index yet. FP8's size comes out with
    scales of two bytes.
    """
    quantized = read_format(json.loads((CONFIGS / f"{name}.json").read_text()))
    assert quantized is not None
    total = 0
    for tensor, (dtypes, shapes) in expected_specs(
        split_experts(big_shapes), quantized, RULES
    ).items():
        if len(dtypes) == 1:
            size = BYTES[dtypes[0]]
        else:
            size = scale_bytes if "_scale" in tensor and "per_expert" not in tensor else 2
        total += prod(shapes[0]) * size
    assert round(total / 1e9, 2) == gigabytes


@pytest.mark.parametrize("name", FORMATS)
def test_each_module_is_as_the_config_says(name, big_shapes):
    """Routers, self-conditioning and the vision tower stay; experts do not."""
    quantized = read_format(json.loads((CONFIGS / f"{name}.json").read_text()))
    assert quantized is not None
    layer = "model.decoder.layers.3."
    assert quantized.quantizes(RULES.all_names(layer + "experts.7.up_proj"))
    assert quantized.quantizes(RULES.all_names(layer + "self_attn.q_proj")) == (
        name != "nvfp4-modelopt"
    )
    kept = ("model.decoder.self_conditioning.gate_proj", layer + "router.proj", "lm_head")
    tower = "model.encoder.vision_tower.encoder.layers.0.mlp.up_proj.linear"
    assert not any(quantized.quantizes(RULES.all_names(module)) for module in (*kept, tower))


SCALE = "model.decoder.layers.1.experts.2.up_proj.weight_scale"


def wrong_scale(weights: dict[str, torch.Tensor]) -> None:
    weights[SCALE] = weights[SCALE][:-1].clone()


def wrong_dtype(weights: dict[str, torch.Tensor]) -> None:
    weights[SCALE.removesuffix("_scale")] = weights[SCALE.removesuffix("_scale")].float()


def missing_scale(weights: dict[str, torch.Tensor]) -> None:
    del weights[SCALE]


def unexpected_scale(weights: dict[str, torch.Tensor]) -> None:
    weights["model.decoder.layers.1.router.proj.weight_scale"] = torch.ones(4, 1)


def doubly_mapped(weights: dict[str, torch.Tensor]) -> None:
    name = "model.decoder.layers.1.mlp.up_proj.weight"
    weights[name.replace("decoder", "encoder.language_model")] = weights[name].clone()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (wrong_scale, [SCALE, "[127, 1]", "[128, 1]"]),
        (wrong_dtype, [SCALE.removesuffix("_scale"), "F32", "F8_E4M3"]),
        (missing_scale, [SCALE, "not"]),
        (unexpected_scale, ["layers.1.router.proj.weight_scale", "belongs to no module"]),
        (
            doubly_mapped,
            ["model.encoder.language_model.layers.1.mlp.up_proj.weight", "same tensor"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_bad_tensors(change, words, quantized, tmp_path):
    """The message names the tensor, its file and what it should be."""
    folder = changed(quantized["fp8-dynamic"], tmp_path / "bad", change)
    message = refusal(folder)
    assert all(word in message for word in [*words, str(folder)])
    if change is not missing_scale:
        assert str(folder / "model.safetensors") in message


def test_one_layer_scalar_is_enough(tmp_path):
    """Encoder and decoder share it; a file may hold either."""

    def drop(weights: dict[str, torch.Tensor]) -> None:
        del weights["model.encoder.language_model.layers.1.layer_scalar"]

    check(changed(SHIPPED, tmp_path / "one", drop))

    def drop_both(weights: dict[str, torch.Tensor]) -> None:
        drop(weights)
        del weights["model.decoder.layers.1.layer_scalar"]

    assert "layers.1.layer_scalar" in refusal(changed(SHIPPED, tmp_path / "none", drop_both))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "float-quantised"}, ["float-quantised", "float-quantized"]),
        (
            {"ignore": ["re:.*router.*", "model.decoder.layers.1.mlpp"]},
            ["layers.1.mlpp", "no module"],
        ),
        ({"ignore": ["re:.*routers.*"]}, ["re:.*routers.*", "no module"]),
        # Not ignored, so it must be quantised, and is not.
        ({"ignore": ["re:.*(router|vision|lm_head).*"]}, ["self_conditioning", "weight_scale"]),
    ],
    ids=str,
)
def test_bad_configs(change, words, quantized, tmp_path):
    folder = reconfigured(
        quantized["fp8-dynamic"], tmp_path / "bad", lambda old: old.update(change)
    )
    message = refusal(folder)
    assert all(word in message for word in words)


def test_patterns_follow_the_checkpoints_names(quantized, tmp_path):
    """An ignore list may speak of the encoder, of the decoder, or of both at once."""
    patterns = ["re:model.encoder.(vision_tower|embed_vision)", "re:model\\.decoder\\.self_cond"]
    routers = ["re:model.encoder.language_model.*router", "lm_head"]

    def change(settings: dict[str, Any]) -> None:
        settings["ignore"] = patterns + routers

    check(reconfigured(quantized["fp8-dynamic"], tmp_path / "patterns", change))


def test_formats_that_are_not_known_here(quantized, tmp_path):
    """Another quantisation of vLLM's passes; its tensors are vLLM's to check."""

    def change(settings: dict[str, Any]) -> None:
        settings["format"] = "int-quantized"
        settings["config_groups"]["group_0"]["weights"]["type"] = "int"

    check(reconfigured(quantized["fp8-dynamic"], tmp_path / "int8", change))


def test_ranks_that_cut_groups(quantized):
    """NVFP4 over so many ranks that a rank's inputs are not whole groups."""
    message = refusal(quantized["nvfp4"], tp=16)
    assert "16 ranks" in message
    assert "--tensor-parallel-size" in message


@pytest.mark.parametrize(
    ("platform", "is_served"),
    [
        ({"is_cuda": True}, True),
        ({"is_rocm": True}, True),
        ({"name": "cpu"}, False),
    ],
    ids=str,
)
def test_fp4_where_nothing_can_run_it(platform, is_served, monkeypatch):
    """vLLM's compiled CPU build has no FP4."""
    import vllm.platforms

    fake = SimpleNamespace(
        is_cuda=lambda: platform.get("is_cuda", False),
        is_rocm=lambda: platform.get("is_rocm", False),
        device_name=platform.get("name", "cuda"),
    )
    monkeypatch.setattr(vllm.platforms, "current_platform", fake)
    settings = json.loads((CONFIGS / "nvfp4.json").read_text())
    check_platform("m", json.loads((CONFIGS / "fp8-dynamic.json").read_text()))
    if is_served:
        check_platform("m", settings)
        return
    with pytest.raises(ValueError, match="can neither run nor emulate"):
        check_platform("m", settings)
