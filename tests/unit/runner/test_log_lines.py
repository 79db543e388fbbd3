"""Tests of the log lines with which a start describes a model."""

import logging

import pytest
import torch
from torch import nn

from vllm_diffusion.weights.loading import counted_downcasts

pytestmark = pytest.mark.engine


def load(dtype):
    from vllm.model_executor.models.utils import AutoWeightsLoader

    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).to(torch.bfloat16)
    weights = [(name, torch.ones(p.shape, dtype=dtype)) for name, p in model.named_parameters()]
    return AutoWeightsLoader(model).load_weights(weights)


def test_downcasts_are_one_line(vllm_log):
    """vLLM's four warnings of tensors cast to bfloat16 become one line with their number."""
    with counted_downcasts():
        assert len(load(torch.float32)) == 4
    assert [record.getMessage() for record in vllm_log.records] == [
        "4 tensors of the checkpoint are torch.float32, and served in torch.bfloat16."
    ]
    vllm_log.clear()
    load(torch.float32)
    assert [record.levelno for record in vllm_log.records] == [logging.WARNING] * 4


def test_what_fits_is_not_mentioned(vllm_log):
    """Tensors that need no cast are not logged, and other warnings are kept."""
    with counted_downcasts():
        load(torch.bfloat16)
        logging.getLogger("vllm.model_executor.models.utils").warning("Something else")
    assert [record.getMessage() for record in vllm_log.records] == ["Something else"]
