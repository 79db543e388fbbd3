"""Which heads a tile can be cut from, and what ranks exchange."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.support.heads import on_shards
from vllm_diffusion.sampling.output_head import OutputHead, head_of


def test_a_quantised_head_is_refused():
    """With the name of what quantises it, and what to do."""
    lm_head = SimpleNamespace(quant_method=SimpleNamespace())
    with pytest.raises(ValueError, match="add lm_head to the ignore list"):
        OutputHead.of(lm_head, None, softcap=None, dtype=None)


def test_scaled_logits_are_refused():
    model = SimpleNamespace(logits_processor=SimpleNamespace(scale=0.5))
    with pytest.raises(ValueError, match="scales its logits"):
        head_of(model)


def test_a_view_with_gaps_is_summed_whole():
    """As the sweeps of a filter's threshold hand it over on a CPU: all but the first column."""
    numbers = torch.arange(64 * 17).view(64, 17)

    def summed(head: OutputHead) -> torch.Tensor:
        return head.sum(numbers.clone()[:, 1:])

    for total in on_shards(torch.zeros(8, 1), [4], None, summed):
        assert torch.equal(total, 2 * numbers[:, 1:])
