"""Tests of FP8 and NVFP4 checkpoints of masked families, run by vLLM's own layers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import apply_quantization_config
from safetensors.torch import load_file, save_file

from tests.support.engines.engine import StepRecord, TracedEngine
from tests.support.families.cases import CASES, Wanted
from tests.support.families.llada2_model import separate_experts
from tests.support.families.mineru_model import IMAGE_ID, num_tokens, picture
from tests.support.families.model import MASK_ID, VOCAB_SIZE, TinyModel, prompt_of
from tests.support.families.run import block_causal, causal_then_block
from tests.support.models.quantized import example, settings_of, written

pytestmark = pytest.mark.engine

FP8 = torch.float8_e4m3fn
EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight")


def quantized(folder: Path, ignore: list[str]) -> Path:
    """Return the checkpoint with FP8 weights by output channel, and dynamic activations."""
    path = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(path).items():
        if tensor.dim() != 2 or name.endswith(EMBEDDINGS) or name.removesuffix(".weight") in ignore:
            tensors[name] = tensor
            continue
        scale = tensor.abs().amax(dim=1, keepdim=True) / torch.finfo(FP8).max
        tensors[name] = (tensor / scale).to(FP8)
        tensors[name.removesuffix("weight") + "weight_scale"] = scale
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = written(settings_of("FP8_DYNAMIC", "float-quantized", ignore))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Round each row to FP8 with a scale of its own, and back."""
    scale = (x.abs().amax(dim=-1, keepdim=True) / torch.finfo(FP8).max).clamp(min=1e-12)
    return (x / scale).to(FP8).to(x.dtype) * scale


def is_unquantized(name: str) -> bool:
    """True for a head, and for what MinerU-Diffusion makes tokens of pictures with."""
    return "head" in name or name.startswith("vision_")


def emulate_fp8(model: TinyModel) -> None:
    """Round the weights and inputs of quantized layers, in place."""
    for name, module in model.body.named_modules():
        if isinstance(module, torch.nn.Linear) and not is_unquantized(name):
            module.weight.data = rounded_rows(module.weight.data)
            module.register_forward_pre_hook(lambda _, inputs: (rounded_rows(inputs[0]),))


def quantize_nvfp4(model: TinyModel, ignore: list[str]) -> dict[str, Any]:
    """Let compressed-tensors round weights and inputs to NVFP4, in place; return its scheme."""
    largest: dict[torch.nn.Module, torch.Tensor] = {}

    def observe(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if inputs[0].numel() == 0:
            # An expert that no token chose.
            return
        seen = inputs[0].abs().amax()
        largest[module] = torch.maximum(largest.get(module, seen), seen)

    linears = [one for one in model.body.modules() if isinstance(one, torch.nn.Linear)]
    hooks = [module.register_forward_pre_hook(observe) for module in linears]
    for seed in range(4):
        model(torch.tensor(prompt_of(64, seed=100 + seed)), block_causal(64, model.block_length))
    for hook in hooks:
        hook.remove()
    settings = settings_of("NVFP4", "nvfp4-pack-quantized", ignore)
    apply_quantization_config(model.body, settings)
    example("quantization/quantize").set_scales(model.body, largest)
    return written(settings)


def save_compressed(model: TinyModel, scheme: dict[str, Any], folder: Path) -> Path:
    """Save the checkpoint with packed weights; the model itself stays unchanged."""
    from compressed_tensors.compressors import compress_module

    compressed = copy.copy(model)
    compressed.body = copy.deepcopy(model.body)
    for module in compressed.body.modules():
        compress_module(module)
    compressed.config = model.config | {"quantization_config": scheme}
    return compressed.save(folder)


def request_of(prompt: list[int]) -> dict[str, Any]:
    """Return a request in which one token stands for the picture."""
    if IMAGE_ID not in prompt:
        return {"prompt_token_ids": prompt}
    first = prompt.index(IMAGE_ID)
    ids = [token for at, token in enumerate(prompt) if token != IMAGE_ID or at == first]
    return {"prompt_token_ids": ids, "multi_modal_data": {"image": [PICTURE]}}


def first_step(
    folder: Path,
    prompt: list[int],
    options: dict[str, Any] | None = None,
) -> StepRecord:
    """Return the engine's first denoising step after a prompt."""
    with (
        TracedEngine(folder, max_model_len=256, **(options or {})) as engine,
        engine.recording() as steps,
    ):
        outputs = engine.llm.generate(
            [request_of(prompt)], Wanted(8).sampling_params(), use_tqdm=False
        )
    assert len(outputs[0].outputs[0].token_ids) == 8
    # A seed row, where there is one, comes before the first step.
    return next(step for step in steps if len(step.canvas) > 1)


def logits_behind(
    model: TinyModel, name: str, prompt: list[int], canvas: list[int]
) -> torch.Tensor:
    """Return PyTorch's logits [C, V - 1] of a first step, without the mask token."""
    length, B = len(prompt), model.block_length
    if name == "nemotron":
        visible = causal_then_block(length, B)
    elif name in WHOLE_SEQUENCES:
        visible = torch.ones(length + len(canvas), length + len(canvas), dtype=torch.bool)
    else:
        visible = block_causal(length + len(canvas), B)
    seeing = model.seeing([PICTURE]) if IMAGE_ID in prompt else model
    return seeing(torch.tensor(prompt + canvas), visible)[length:, MASK_LESS]


def ignored(name: str) -> list[str]:
    """Return the modules that are not quantized, by the checkpoint's names."""
    names = [HEADS.get(name, "lm_head")]
    names += [f"model.layers.{layer}.mlp.gate" for layer in ROUTED.get(name, ())]
    body = CASES[name].make().body
    linears = [at for at, one in body.named_modules() if isinstance(one, torch.nn.Linear)]
    return [*names, *(at for at in linears if at.startswith("vision_"))]


# Of 70 tokens.
PICTURE = picture(80, 56)
WHOLE_SEQUENCES = ("llada", "llada-moe", "illada")
FAMILIES = [
    "sdar",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("nemotron", "llada2.0", "a2d", "mineru", *WHOLE_SEQUENCES)
    ),
]
# By the checkpoint's names, where it is no ``lm_head``.
HEADS = {
    "nemotron": "diffusion_head",
    "llada": "model.transformer.ff_out",
    "mineru": "language_model.lm_head",
}
# Layers with experts.
ROUTED = {"llada2.0": (1, 2), "llada-moe": (0, 2)}
MASK_LESS = torch.arange(VOCAB_SIZE) != MASK_ID
# A rounding of another kind may choose another expert, in a few rows. Where each row sees all
# others, one number of one row that lies between two of FP8's changes them all: in PyTorch alone
# noise of 1e-6 does, by up to 0.29 of the distance to exact ones.
ALLOWED = {"llada2.0": 0.25, **dict.fromkeys(WHOLE_SEQUENCES, 0.3)}


def rounded(name: str, scheme: str, folder: Path) -> tuple[Path, TinyModel]:
    """Return a family's checkpoint in a format, and PyTorch's model with the same rounding."""
    model: TinyModel = CASES[name].make()
    separate_experts(model.body)
    if scheme == "fp8":
        checkpoint = quantized(model.save(folder), ignored(name))
        emulate_fp8(model)
        return checkpoint, model
    # The body has the names of transformers, the file those of the publisher.
    settings = quantize_nvfp4(model, ["lm_head", *ignored(name)])
    return save_compressed(model, settings | {"ignore": ignored(name)}, folder), model


@pytest.mark.parametrize("scheme", ["fp8", "nvfp4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits(name: str, scheme: str, tmp_path: Path) -> None:
    """The engine's logits are far nearer to PyTorch's with the same rounding than to exact ones.

    FP8 with dynamic activations is emulated; NVFP4 is compressed-tensors' own forward.
    """
    checkpoint, model = rounded(name, scheme, tmp_path)
    prompt, options = prompt_of(64), dict(CASES[name].options)
    if name == "mineru":
        prompt = prompt[:29] + [IMAGE_ID] * num_tokens(PICTURE) + prompt[-29:]
        options["limit_mm_per_prompt"] = {"image": 1}
    step = first_step(checkpoint, prompt, options=options)
    ours, canvas = step.logits[:, MASK_LESS], step.canvas.tolist()
    if name in WHOLE_SEQUENCES:
        # Recorded from the canvas's first token, which is the prompt's.
        canvas = [MASK_ID] * len(canvas)
    exact = logits_behind(CASES[name].make(), name, prompt, canvas)
    distance = (ours - logits_behind(model, name, prompt, canvas)).abs().mean(dim=-1).median()
    assert distance < ALLOWED.get(name, 0.02) * (ours - exact).abs().mean()
