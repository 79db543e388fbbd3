"""Checkpoints made for tests: the shipped one's files with other weights or settings."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_diffusion.checkpoints import shipped_checkpoint

SHIPPED = shipped_checkpoint()


def benchmark_config(name: str) -> Any:
    """Return a configuration of ``benchmarks/configs/``: of a model, or of its quantization."""
    folder = Path(__file__).resolve().parents[3] / "benchmarks/configs"
    return json.loads((folder / f"{name}.json").read_text())


def copy_checkpoint(
    folder: Path,
    *,
    config: dict[str, Any] | None = None,
    text_config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
) -> Path:
    """Copy the shipped checkpoint with keys replaced; a value of ``None`` removes one."""
    shutil.copytree(SHIPPED, folder, dirs_exist_ok=True)
    for name, changes, section in (
        ("config.json", config, None),
        ("config.json", text_config, "text_config"),
        ("generation_config.json", generation_config, None),
    ):
        if not changes:
            continue
        path = folder / name
        content = json.loads(path.read_text())
        target = content[section] if section else content
        for key, value in changes.items():
            if value is None:
                target.pop(key, None)
            else:
                target[key] = value
        path.write_text(json.dumps(content))
    return folder


def copy_all_but_weights(source: Path, folder: Path) -> None:
    """Make a folder with a checkpoint's other files."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file() and "safetensors" not in path.name:
            shutil.copy(path, folder)


def changed(
    source: Path,
    folder: Path,
    change: Callable[[dict[str, Tensor]], Any] = lambda tensors: None,
    reconfigure: Callable[[dict[str, Any]], Any] = lambda config: None,
) -> Path:
    """Return a copy of a checkpoint with its tensors and ``config.json`` changed in place."""
    copy_all_but_weights(source, folder)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    reconfigure(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_single_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take apart what ``transformers`` keeps as one tensor for all experts."""
    single: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, end = name.rpartition(".")
        if not stem.endswith(".experts") or tensor.dim() != 3:
            single[name] = tensor
            continue
        for idx, expert in enumerate(tensor):
            matrices = (expert,) if end == "down_proj" else expert.chunk(2)
            ends = ("down_proj",) if end == "down_proj" else ("gate_proj", "up_proj")
            for each, matrix in zip(ends, matrices, strict=True):
                single[f"{stem}.{idx}.{each}.weight"] = matrix.contiguous()
    return single


def random_checkpoint(
    folder: Path, *, seed: int = 0, gain: float = 0.5, embed: float = 3.0, **changes: Any
) -> Path:
    """A checkpoint of random weights whose distributions are far from uniform.

    With these defaults a rounding error of a logit stays below 1e-3 over a generation; with twice
    the gain it grows tenfold in each step, and no two implementations agree on whole generations.

    Args:
        folder: Where to put it.
        seed: Of the weights.
        gain: Standard deviation of matrices relative to ``1 / sqrt(fan_in)``.
        embed: The same of the token embeddings, which are also the head: logits of this size. Flat
            distributions would make all soft embeddings the same tiny vector, whose normalisation
            in the self-conditioning module blows up rounding errors.
        changes: As for :func:`copy_checkpoint`.
    """
    from transformers import DiffusionGemmaForBlockDiffusion

    copy_checkpoint(folder, **changes)
    model = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32)
    randomize(model, seed=seed, gain=gain, embed=embed)
    model.save_pretrained(folder)
    return folder


def randomize(
    model: torch.nn.Module, *, seed: int = 0, gain: float = 0.5, embed: float = 3.0
) -> None:
    """Draw every matrix of a model in place; arguments as for :func:`random_checkpoint`."""
    generator = torch.Generator().manual_seed(seed)
    seen: set[int] = set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.data_ptr() in seen or parameter.dim() < 2:
                continue
            seen.add(parameter.data_ptr())
            scale = embed if "embed_tokens" in name else gain
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * scale / parameter.shape[-1] ** 0.5)


def write_headers(folder: Path) -> Path:
    """Give a folder with only a ``config.json`` of DiffusionGemma the tensors that it describes, of
    zeros.

    The file is sparse, so that a large model takes no room.
    """
    from transformers import DiffusionGemmaConfig

    from benchmarks.memory_limit import expected_specs
    from vllm_diffusion.families.diffusion_gemma.startup import DiffusionGemmaTensors
    from vllm_diffusion.weights.checkpoint_tensors import split_experts

    config = json.loads((folder / "config.json").read_text())
    rules = DiffusionGemmaTensors()
    shapes = rules.shapes(DiffusionGemmaConfig.from_dict(config))
    quantization = config.get("quantization_config")
    shapes = shapes if quantization is None else split_experts(shapes)
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in expected_specs(shapes, quantization, rules).items():
        begin, end = end, end + math.prod(shape) * (2 if dtype == "BF16" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    return folder
