"""What a start says of a model, in lines that hold for it."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_diffusion.runner.model_state import BlockDiffusionModelState
from vllm_diffusion.weights.downcasts import counted_downcasts

pytestmark = pytest.mark.engine


def load(dtype):
    from vllm.model_executor.models.utils import AutoWeightsLoader

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(torch.bfloat16)
    weights = [(name, torch.ones(p.shape, dtype=dtype)) for name, p in model.named_parameters()]
    return AutoWeightsLoader(model).load_weights(weights)


def test_downcasts_are_one_line(vllm_log):
    """Four tensors of float32 into bfloat16: vLLM's four warnings are one line with their number."""
    with counted_downcasts():
        assert len(load(torch.float32)) == 4
    assert [record.getMessage() for record in vllm_log.records] == [
        "4 tensors of the checkpoint are torch.float32, and served in torch.bfloat16."
    ]
    vllm_log.clear()
    load(torch.float32)
    assert [record.levelno for record in vllm_log.records] == [logging.WARNING] * 4


def test_what_fits_is_not_mentioned(vllm_log):
    with counted_downcasts():
        load(torch.bfloat16)
        logging.getLogger("vllm.model_executor.models.utils").warning("Something else")
    assert [record.getMessage() for record in vllm_log.records] == ["Something else"]


@pytest.mark.parametrize(
    ("conditioned", "words"),
    [(True, "embedding with self-conditioning and sampling"), (False, "sampling")],
)
def test_captured_parts(conditioned, words):
    """Self-conditioning is of the families that have it."""
    state = SimpleNamespace(soft_embeds=torch.zeros(1) if conditioned else None)
    assert BlockDiffusionModelState._captured_parts(state) == words
