"""Checkpoints written by other tools start if stock vLLM serves them; oddities are logged."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.engines.engine import TracedEngine
from tests.support.engines.vllm_configs import configure
from tests.support.models.checkpoints import SHIPPED, changed, copy_checkpoint
from tests.support.models.quantized import block_checkpoint, example, quantized_checkpoint

pytestmark = pytest.mark.engine
# vLLM serves the method fp8 in these alone.
OPTIONS: dict[str, dict[str, Any]] = {"compressed-tensors": {}, "fp8": {"dtype": "bfloat16"}}


def answers(checkpoint: Path, **options: Any) -> list[list[int]]:
    """Return an engine's answers to prompts that the shipped checkpoint was trained on."""
    prompts = example("quantization/quantize").read_prompts(SHIPPED, None, 3)
    with TracedEngine(checkpoint, max_model_len=256, **options) as engine:
        outputs = engine.generate(prompts, seeds=[1, 2, 3], max_tokens=32)
        return [list(output.token_ids) for output in outputs]


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized_checkpoint(tmp_path_factory.mktemp("fp8") / "fp8", "fp8-dynamic")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return answers(SHIPPED)


def test_newer_version(fp8: Path, tmp_path: Path) -> None:
    """A file of a newer compressed-tensors than the installed one is configured."""

    def renew(config: dict[str, Any]) -> None:
        config["quantization_config"]["version"] = "0.18.0"

    configure(changed(fp8, tmp_path / "new", reconfigure=renew))


def test_adapter_beside_the_weights(
    tmp_path: Path, expected: list[list[int]], start_log: pytest.LogCaptureFixture
) -> None:
    """An adapter in the folder is left out with a log line, unless adapters are served."""
    folder = copy_checkpoint(tmp_path)
    matrices = {
        f"base_model.model.model.decoder.layers.0.mlp.up_proj.lora_{half}.weight": torch.ones(shape)
        for half, shape in (("A", (2, 128)), ("B", (256, 2)))
    }
    save_file(matrices, folder / "adapter_model.safetensors")
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    configure(folder)
    (line,) = [line for line in start_log.messages if "without it" in line]
    assert f"--enable-lora --lora-modules NAME={folder}" in line
    start_log.clear()
    rules = configure(folder, enable_lora=True).model_config.diffusion.adapters
    assert not [line for line in start_log.messages if "without it" in line]
    rules.check(str(folder))
    assert answers(folder) == expected


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
def test_scales_of_blocks(
    method: str, fp8: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    """FP8 with scales by block runs without a GPU and gives the answers of its weights."""
    folder = block_checkpoint(fp8, tmp_path / "block", method)
    assert answers(folder, **OPTIONS[method]) == expected


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
def test_layers_without_v_proj(method: str, fp8: Path, tmp_path: Path) -> None:
    """A list with queries and keys of layers that have no values of their own loads."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    source = fp8
    if method == "fp8":
        source = block_checkpoint(fp8, tmp_path / "block", method)
    names = [f"model.decoder.layers.1.self_attn.{part}_proj" for part in "qk"]
    key = "ignore" if method == "compressed-tensors" else "modules_to_not_convert"
    original = load_file(SHIPPED / "model.safetensors")

    def unquantize(tensors: dict[str, Tensor]) -> None:
        for name in names:
            for end in ("weight_scale", "weight_scale_inv"):
                tensors.pop(f"{name}.{end}", None)
            tensors[f"{name}.weight"] = original[f"{name}.weight"]

    folder = changed(
        source,
        tmp_path / "ignored",
        unquantize,
        lambda config: config["quantization_config"][key].extend(names),
    )
    options = OPTIONS[method]
    with TracedEngine(folder, max_model_len=256, **options) as engine:
        layers = engine.runner.model.model.layers
        kinds = [type(layer.self_attn.qkv_proj.quant_method) for layer in layers]
        assert [kind is UnquantizedLinearMethod for kind in kinds] == [False, True, False, False]
