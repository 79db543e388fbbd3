"""Quantized drafts whose files list unquantized modules under the checkpoint's own names."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engines.draft_engine import metric
from tests.support.engines.engine import TracedEngine
from vllm_diffusion.checkpoints import DRAFT_FOLDERS, FOLDERS
from vllm_diffusion.drafting import quantized

pytestmark = pytest.mark.engine

_NUMBERS = {"num_bits": 8, "type": "float", "symmetric": True}
_GROUP = {
    "targets": ["Linear"],
    "weights": {**_NUMBERS, "strategy": "channel", "dynamic": False},
    "input_activations": {**_NUMBERS, "strategy": "token", "dynamic": True},
}


def compressed(ignore: list[str], targets: list[str] | None = None) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {"group_0": _GROUP | {"targets": targets or ["Linear"]}},
    }


def ignored(ignore: list[str]) -> set[str]:
    """Return vLLM's modules that stay unquantized, of a three-layer draft for a target of four
    layers.
    """
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.utils import (
        should_ignore_layer,
    )
    from vllm.model_executor.models import qwen3_dflash

    quantized.install()
    config = CompressedTensorsConfig.from_config(compressed(ignore))
    mapper = qwen3_dflash.DFlashQwen3Model.hf_to_vllm_mapper
    qwen3_dflash.map_draft_quant_config(config, mapper, "model", 4, 3)
    modules = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
    names = ["fc", *(f"layers.{layer}.{name}" for layer in (4, 5, 6) for name in modules)]
    return {
        name
        for name in names
        if should_ignore_layer(f"model.{name}", config.ignore, config.packed_modules_mapping)
    }


@pytest.mark.parametrize(
    ("ignore", "expected"),
    [
        (["fc", "lm_head"], {"fc"}),
        (["model.fc"], {"fc"}),
        (["re:fc"], {"fc"}),
        (["re:.*fc$"], {"fc"}),
        (["layers.0.mlp.down_proj"], {"layers.4.mlp.down_proj"}),
        ([r"re:layers\.2\.mlp\..*"], {"layers.6.mlp.gate_up_proj", "layers.6.mlp.down_proj"}),
        ([f"layers.1.self_attn.{name}_proj" for name in "qkv"], {"layers.5.self_attn.qkv_proj"}),
        (["re:.*o_proj"], {f"layers.{layer}.self_attn.o_proj" for layer in (4, 5, 6)}),
        # As vLLM names it.
        (["model.layers.4.mlp.down_proj"], {"layers.4.mlp.down_proj"}),
        (["encoder.fc"], {"fc"}),
        (["lm_head"], set()),
    ],
)
def test_ignored_modules(ignore: list[str], expected: set[str]) -> None:
    """Names and patterns of a checkpoint, and vLLM's own names, keep the same modules
    unquantized.
    """
    assert ignored(ignore) == expected


def test_names_of_other_methods() -> None:
    """Lists of ignored layers are renamed to vLLM's names for other quantization methods too."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    fp8 = Fp8Config(True, ignored_layers=["fc", "layers.0.mlp", "lm_head"])
    quantized.rename_modules(fp8, "model", 4, 1)
    parts = [f"model.layers.4.mlp.{name}_proj" for name in ("gate", "up", "down")]
    assert fp8.ignored_layers == ["model.fc", *parts, "lm_head"]


@pytest.mark.slow
def test_accepted(tmp_path: Path) -> None:
    """A draft in FP8 whose ``fc`` is unquantized still has more than a fifth of its drafted tokens
    accepted.
    """
    folder = tmp_path / "draft"
    shutil.copytree(DRAFT_FOLDERS["qwen3"], folder, copy_function=shutil.copyfile)
    path = folder / "config.json"
    content = json.loads(path.read_text()) | {"quantization_config": compressed(["fc", "lm_head"])}
    path.write_text(json.dumps(content))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        tensors[name] = tensor
        if tensor.dim() == 2 and "layers." in name:
            scale = tensor.abs().amax(1, keepdim=True) / 448
            tensors |= {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    spec = {"method": "dflash", "model": str(folder), "num_speculative_tokens": 7}
    with TracedEngine(
        FOLDERS["qwen3"],
        max_model_len=256,
        max_num_seqs=4,
        disable_log_stats=False,
        speculative_config=spec,
    ) as engine:
        engine.llm.chat([{"role": "user", "content": "What is 7+8?"}], use_tqdm=False)
        drafted = metric(engine, "num_draft_tokens")
        assert metric(engine, "num_accepted_tokens") > 0.2 * drafted
