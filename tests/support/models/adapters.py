"""LoRA adapters as PEFT makes them, with random matrices."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

# Everything of DiffusionGemma's layers that PEFT finds as a module, and its experts.
LINEAR = r"(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj|router\.proj)"
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ENCODER = rf".*encoder\.language_model\..*{LINEAR}"
DECODER = rf".*decoder\.layers\..*{LINEAR}"
CONDITIONING = r".*decoder\.self_conditioning\..*_proj"


def adapt(
    model: nn.Module,
    folder: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    size: float = 0.5,
    **config: Any,
) -> Any:
    """Put an adapter on ``model``, whose forward has it from now on, and save it in ``folder``.

    Args:
        model: Changed in place.
        folder: Where PEFT writes the adapter.
        seed: Of its matrices.
        rank: Of its matrices.
        size: Of what they write for inputs of size 1. At 0.5 tokens of random weights change; those
            of the trained checkpoint do at 1.
        config: For ``LoraConfig``.

    Returns:
        PEFT's model.
    """
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(**({"r": rank, "lora_alpha": 2 * rank} | config)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(size * noise / parameter.shape[-1] ** 0.5)
    adapted.eval().save_pretrained(folder)
    return adapted


def merge_shared(model: nn.Module, folder: Path, *, seed: int = 0, rank: int = 4) -> None:
    """Save an adapter of DiffusionGemma's shared stack as NeMo does, and merge it into ``model`` as
    NeMo does.

    Its modules are named ``model.layers.*``; the merge adds to the decoder's weights, which are the
    encoder's.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.get_submodule("model.decoder").named_modules():
        if not isinstance(module, nn.Linear) or not re.search(rf"layers\..*{LINEAR}$", name):
            continue
        out_features, in_features = module.weight.shape
        down = 0.5 * torch.randn(rank, in_features, generator=generator) / in_features**0.5
        up = 0.5 * torch.randn(out_features, rank, generator=generator) / rank**0.5
        tensors |= {f"model.{name}.lora_A": down, f"model.{name}.lora_B": up}
        with torch.no_grad():
            # lora_alpha is twice the rank.
            module.weight += 2 * up @ down
    write_adapter(folder, tensors, {"r": rank, "lora_alpha": 2 * rank})


def rename(folder: Path, published: Callable[[str], str]) -> None:
    """Give a saved adapter's modules the names that the published model has for them."""
    path = folder / "adapter_model.safetensors"
    prefix = "base_model.model."
    tensors = {
        prefix + published(name.removeprefix(prefix)): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def write_adapter(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None
) -> Path:
    """Write an adapter's files without PEFT: names without prefix, ``config`` over rank 4."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": [], "bias": "none"}
    content |= config or {}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    named = {f"base_model.model.{name}.weight": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def put_into_hub_cache(cache: Path, repository: str, folder: Path) -> Path:
    """Lay a folder out as Hugging Face's hub does what it has fetched.

    Returns:
        The snapshot.
    """
    stored = cache / f"models--{repository.replace('/', '--')}"
    snapshot = stored / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, snapshot)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(snapshot.name)
    return snapshot
