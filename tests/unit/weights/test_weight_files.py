"""The files of a checkpoint's weights are those that vLLM's loader reads, with finite numbers."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.engines.vllm_configs import vllm_config
from vllm_diffusion.weights.adapters.checking_manager import Adaptable
from vllm_diffusion.weights.new_weights import check_folder
from vllm_diffusion.weights.weight_files import (
    INDEX,
    check_weight_files,
    choose_weight_files,
    largest_magnitude,
    stored_tensors,
    weight_files,
)

pytestmark = pytest.mark.engine


def folder_of(folder: Path, files: list[str], index: list[str] | None = None) -> Path:
    for name in files:
        prefix = "base_model.model." if name.startswith("adapter") else ""
        save_file({f"{prefix}{name}": torch.zeros(1)}, folder / name)
    if index is not None:
        names = {f"tensor {i}": name for i, name in enumerate(index)}
        (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    return folder


def read_by_vllm(folder: Path) -> list[str]:
    """Return the files whose tensors vLLM's loader hands on, after start-up's choice."""
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    config = vllm_config(use_tqdm_on_load=False)
    config.model_config.model = str(folder)
    choose_weight_files(config)
    loader = DefaultModelLoader(config.load_config)
    names = [name for name, _ in loader.get_all_weights(config.model_config, Adaptable())]
    return sorted(name.removeprefix("base_model.model.") for name in names)


@pytest.mark.parametrize(
    ("files", "index", "expected"),
    [
        (["model.safetensors"], None, ["model.safetensors"]),
        (["a.safetensors", "b.safetensors"], None, ["a.safetensors", "b.safetensors"]),
        (["a.safetensors", "b.safetensors"], ["b.safetensors"], ["b.safetensors"]),
        (["consolidated.safetensors", "m.safetensors"], ["m.safetensors"], ["m.safetensors"]),
        (["consolidated.safetensors", "m.safetensors"], None, ["consolidated.safetensors"]),
        (["adapter_model.safetensors", "m.safetensors"], None, ["m.safetensors"]),
    ],
    ids=str,
)
def test_same_files_as_vllm(
    files: list[str], index: list[str] | None, expected: list[str], tmp_path: Path
) -> None:
    """The weight files found are those that vLLM's loader reads."""
    folder = folder_of(tmp_path, files, index)
    assert [path.name for path in weight_files(folder)] == expected
    assert read_by_vllm(folder) == expected


def test_files_beside_an_index_are_not_checked(tmp_path: Path) -> None:
    """A damaged file that the index does not list is not a reason to refuse."""
    folder = folder_of(tmp_path, ["m.safetensors"], ["m.safetensors"])
    (folder / "consolidated.safetensors").write_bytes(b"no")
    check_weight_files(str(folder))
    (folder / "m.safetensors").unlink()
    with pytest.raises(ValueError, match="m.safetensors, which does not exist"):
        check_weight_files(str(folder))


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{"]
)
def test_index_of_no_files(content: str, tmp_path: Path) -> None:
    """An index without a map of files is refused."""
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ValueError, match="holds no weight_map of files"):
        weight_files(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ["part 1.pth", "part 2.pth"],
        *(
            pytest.param(names, marks=pytest.mark.slow)
            for names in (
                ["pytorch_model.bin", "training_args.bin"],
                [
                    "pytorch_model-00001-of-00002.bin",
                    "pytorch_model-00002-of-00002.bin",
                    "optimizer.pt",
                ],
                ["model.pt"],
            )
        ),
    ],
    ids=str,
)
def test_pickled_weights(names: list[str], tmp_path: Path) -> None:
    """Pickled weights are refused with a command that converts them to accepted files."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    shared, tensors = torch.arange(4.0), {}
    for i, name in enumerate(names):
        tensors |= {f"{i}.a": shared, f"{i}.b": shared[1:3], f"{i}.c": shared.reshape(2, 2).t()}
        torch.save(
            {key: tensor for key, tensor in tensors.items() if key.startswith(f"{i}.")},
            folder / name,
        )
    with pytest.raises(ValueError, match="pickled weights only") as raised:
        check_weight_files(str(folder))
    command = str(raised.value).partition("Convert them with: ")[2]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(command, shell=True, check=True, env={**os.environ, "PATH": path})
    check_weight_files(str(folder))
    converted = {
        key: tensor for file in weight_files(folder) for key, tensor in load_file(file).items()
    }
    weights = {
        key: tensor
        for key, tensor in tensors.items()
        if not names[int(key[0])].startswith(("training", "optimizer"))
    }
    assert converted.keys() == weights.keys()
    assert all(torch.equal(converted[key], tensor) for key, tensor in weights.items())


def written(folder: Path, values: Tensor) -> Path:
    save_file({"values": values}, folder / "values.safetensors")
    return folder / "values.safetensors"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
)
def test_largest_magnitude(
    dtype: torch.dtype, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest magnitude covers every value across chunks, also in FP8 without infinity."""
    monkeypatch.setattr("vllm_diffusion.weights.weight_files._CHUNK_BYTES", 64)
    values = torch.linspace(-3, 2, 400).to(dtype)

    def largest(values: Tensor) -> float:
        (tensor,) = stored_tensors([written(tmp_path, values)])
        return largest_magnitude(tensor)

    assert largest(values) == values.float().abs().max()
    assert largest((-values.float()).to(dtype)) == values.float().abs().max()
    assert largest(values[:0]) == 0
    for place in (0, 37, 399):
        changed = values.float()
        changed[place] = value
        changed = changed.to(dtype)
        found = largest(changed)
        if changed.float().isfinite().all():
            assert found == changed.float().abs().max()
        else:
            assert not math.isfinite(found)
    if dtype == torch.float8_e4m3fn:
        for bits in (0x7F, 0xFF):
            changed = values.clone()
            changed.view(torch.uint8)[101] = bits
            assert math.isnan(largest(changed))


def test_check_folder(tmp_path: Path) -> None:
    """Tensors that are not finite are named, and other kinds of numbers are not checked."""
    tensors: dict[str, Any] = {
        "counts": torch.arange(3),
        "scales": torch.ones(2).to(torch.float8_e8m0fnu),
        "good": torch.ones(2),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    check_folder(str(tmp_path))
    save_file(tensors | {"bad": torch.tensor([1, math.nan])}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="bad holds numbers that are not finite.*Nothing was"):
        check_folder(str(tmp_path))
    # What is in a repository vLLM looks for.
    check_folder("somebody/something")
