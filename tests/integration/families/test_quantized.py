"""FP8 checkpoints of masked families, by vLLM's own layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.engine import TracedEngine
from tests.support.families import model as tiny
from tests.support.families.cases import Wanted
from tests.support.families.llada2_model import llada2
from tests.support.families.model import TinyModel, prompt_of
from tests.support.families.run import block_causal, causal_then_block

pytestmark = pytest.mark.engine

FP8 = torch.float8_e4m3fn
SCHEME: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "strategy": "token",
                "symmetric": True,
                "dynamic": True,
            },
        }
    },
}


def quantized(folder: Path, ignore: list[str]) -> Path:
    """The checkpoint with FP8 weights, a scale for each output channel, and dynamic activations."""
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if not name.endswith(("_proj.weight", "query_key_value.weight", "dense.weight")):
            tensors[name] = tensor
            continue
        scale = tensor.abs().amax(dim=1, keepdim=True) / torch.finfo(FP8).max
        tensors[name] = (tensor / scale).to(FP8)
        tensors[name.removesuffix("weight") + "weight_scale"] = scale
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = SCHEME | {"ignore": ignore}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Each row in FP8 with a scale of its own, and back."""
    scale = (x.abs().amax(dim=-1, keepdim=True) / torch.finfo(FP8).max).clamp(min=1e-12)
    return (x / scale).to(FP8).to(x.dtype) * scale


def emulate_fp8(model: TinyModel) -> None:
    """Round weights and inputs of what is quantised, in place."""
    for name, module in model.body.named_modules():
        if isinstance(module, torch.nn.Linear) and "head" not in name:
            module.weight.data = rounded_rows(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (rounded_rows(inputs[0]),))


@pytest.mark.parametrize(
    "name", ["sdar", *(pytest.param(n, marks=pytest.mark.slow) for n in ("nemotron", "llada2"))]
)
def test_fp8_dynamic(name: str, tmp_path: Path) -> None:
    """The first step's logits are those of PyTorch with the same rounding, which is not none."""
    model: TinyModel = llada2() if name == "llada2" else getattr(tiny, name)()
    head = "diffusion_head" if name == "nemotron" else "lm_head"
    ignore = [head]
    if name == "llada2":
        ignore += [f"model.layers.{layer}.mlp.gate" for layer in (1, 2)]
    folder = quantized(model.save(tmp_path), ignore)
    engine = TracedEngine(folder, max_model_len=256)
    prompt = prompt_of(64)
    try:
        with engine.recording() as steps:
            outputs = engine.llm.generate(
                [{"prompt_token_ids": prompt}], Wanted(8).sampling_params(), use_tqdm=False
            )
    finally:
        engine.close()
    assert len(outputs[0].outputs[0].token_ids) == 8
    # A seed row, where there is one, comes before the first step.
    first = next(step for step in steps if len(step.canvas) > 1)
    ids = torch.tensor(prompt + first.canvas.tolist())
    B = model.block_length
    visible = causal_then_block(64, B) if name == "nemotron" else block_causal(64 + B, B)
    mask_less = torch.arange(model.config["vocab_size"]) != tiny.MASK_ID
    exact = model(ids, visible)[64:, mask_less]
    emulate_fp8(model)
    rounded = model(ids, visible)[64:, mask_less]
    ours = first.logits[:, mask_less]
    # A rounding of another kind may choose another expert, in a few rows.
    allowed = 0.25 if name == "llada2" else 0.02
    distance = (ours - rounded).abs().mean(dim=-1).median()
    assert distance < allowed * (ours - exact).abs().mean()
