"""Logits of a prompt: vLLM asks for 1,024 rows at once, which its memory profile knows nothing of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vllm_diffusion.families.diffusion_gemma.model import DiffusionGemmaForBlockDiffusion

pytestmark = pytest.mark.engine


class Float32Storages(TorchDispatchMode):
    """The storages of float32 tensors that operations make, each of them kept."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.float32:
            self.kept[out.untyped_storage().data_ptr()] = out
        return out


def test_logits_are_held_once_in_float32():
    hidden, head = torch.randn(7, 8).bfloat16() * 30, torch.randn(8, 50).bfloat16()
    model = SimpleNamespace(
        logits_processor=lambda weights, rows: rows @ weights, lm_head=head, softcap=30.0
    )
    with Float32Storages() as storages:
        logits = DiffusionGemmaForBlockDiffusion.compute_logits(model, hidden)
    assert len(storages.kept) == 1
    assert torch.equal(logits, torch.tanh((hidden @ head).float() / 30.0) * 30.0)
