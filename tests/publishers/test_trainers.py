"""Checkpoints as trainers' own export code writes them."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.integration.families.test_trainers import answer_of
from tests.publishers import checkout
from tests.support.models.checkpoints import SHIPPED, changed

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_diffusion_gemma_of_nemo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A DiffusionGemma that NeMo AutoModel has read and written again gives the same tokens."""
    monkeypatch.syspath_prepend(str(checkout("Automodel")))
    name = "nemo_automodel.components.models.diffusion_gemma.state_dict_adapter"
    adapter = importlib.import_module(name).DiffusionGemmaStateDictAdapter(
        SimpleNamespace(), SimpleNamespace(n_routed_experts=4), SimpleNamespace(), torch.float32
    )

    def write_again(tensors: dict[str, Tensor]) -> None:
        written = adapter.to_hf(adapter.from_hf(dict(tensors)))
        tensors.clear()
        tensors.update({name: tensor.contiguous() for name, tensor in written.items()})

    folder = changed(SHIPPED, tmp_path / "nemo", write_again)
    assert answer_of(folder) == answer_of(SHIPPED)
