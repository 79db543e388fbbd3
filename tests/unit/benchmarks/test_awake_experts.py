"""Tests of random routers that choose as few experts as trained ones do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.engine


def test_a_canvas_wakes_84_of_128_experts(monkeypatch):
    """The 256 rows of a canvas choose exactly the 84 experts that keep their weights."""
    from awake_experts import DummyModelLoader, Loader
    from vllm.config import LoadConfig

    monkeypatch.setattr(DummyModelLoader, "load_weights", lambda *args: None)
    torch.manual_seed(0)
    router = nn.Linear(2816, 128, bias=False)
    model = nn.ModuleDict({"layer": nn.ModuleDict({"router": nn.ModuleDict({"proj": router})})})
    config = SimpleNamespace(hf_config=SimpleNamespace(awake_experts=84))
    Loader(LoadConfig(load_format="dummy")).load_weights(model, config)
    chosen = router(torch.randn(256, 2816)).topk(8).indices
    assert chosen.unique().tolist() == list(range(84))
