"""Adapters with the published ranks and modules fit the checkpoints that they are for."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.families.published import adapters, files_of, tensors_of
from vllm_diffusion.families.nemotron.startup import find_draft_lora
from vllm_diffusion.startup.plan import DiffusionPlan
from vllm_diffusion.weights.adapters.support import (
    CONFIG,
    WEIGHTS,
    AdapterSupport,
    Module,
    adapted_modules,
)

pytestmark = pytest.mark.engine

ALL = pytest.mark.parametrize("adapter", adapters(), ids=lambda adapter: adapter["id"])


def first_layer_of(adapter: dict[str, Any]) -> tuple[dict[str, Module], Any]:
    """Return the modules of a checkpoint of one layer of published width, and its configuration."""
    config = dict(files_of(adapter["base"]).config)
    config |= {name: 1 for name in ("num_hidden_layers", "n_layers") if name in config}
    tensors, made = tensors_of(config)
    return adapted_modules(tensors, made), made


def written(adapter: dict[str, Any], folder: Path, modules: dict[str, Module]) -> Path:
    """Write files as PEFT does, with matrices for each module that ``target_modules`` matches."""
    values = adapter["values"]
    folder.mkdir(parents=True)
    (folder / CONFIG).write_text(
        json.dumps(values | {"peft_type": "LORA", "bias": "none"}), encoding="utf-8"
    )
    tensors = {}
    for name, module in modules.items():
        if name.rpartition(".")[2] in values["target_modules"]:
            sizes = {
                "A": (values["r"], module.in_features),
                "B": (module.out_features, values["r"]),
            }
            for half, size in sizes.items():
                tensor = torch.zeros(size, dtype=torch.bfloat16)
                tensors[f"base_model.model.{name}.lora_{half}.weight"] = tensor
    save_file(tensors, folder / WEIGHTS)
    return folder


@ALL
def test_it_fits(adapter: dict[str, Any], tmp_path: Path) -> None:
    """The published rank and modules are accepted, and a server for smaller ranks refuses them."""
    modules, _ = first_layer_of(adapter)
    targets = adapter["values"]["target_modules"]
    assert adapter["module"] in modules
    assert set(targets) <= {name.rpartition(".")[2] for name in modules}
    folder = written(adapter, tmp_path / "adapter", modules)
    rank = adapter["values"]["r"]
    assert AdapterSupport(modules, max_rank=rank).check(str(folder)) == folder
    with pytest.raises(ValueError, match="max-lora-rank"):
        AdapterSupport(modules, max_rank=rank // 2).check(str(folder))


def test_nemotron_drafts_with_it(tmp_path: Path) -> None:
    """Nemotron's own adapter is read with its published rank and factor."""
    (adapter,) = [adapter for adapter in adapters() if "linear_spec_lora" in adapter["id"]]
    modules, config = first_layer_of(adapter)
    written(adapter, tmp_path / "linear_spec_lora", modules)
    model: Any = SimpleNamespace(
        model=str(tmp_path), hf_config=config, revision=None, diffusion=DiffusionPlan()
    )
    found = find_draft_lora(model)
    assert found is not None
    assert (found.rank, found.scale) == (128, 4.0)
