"""New weights that are not finite are found in files and tensors, and refused by name."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_diffusion.weights.new_weights import check_folder
from vllm_diffusion.weights.weight_files import largest_magnitude, stored_tensors

pytestmark = pytest.mark.engine


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
