"""Tests of the heads that tiles can be cut from, and of what ranks exchange."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.models.heads import on_shards, output_head
from vllm_diffusion.sampling.output_head import OutputHead, head_of


def test_a_quantised_head_is_refused():
    """A quantized head is refused with the name of its method and a remedy."""
    lm_head = SimpleNamespace(quant_method=SimpleNamespace())
    with pytest.raises(ValueError, match="add lm_head to the ignore list"):
        OutputHead.of(lm_head, None, softcap=None, dtype=None)


def test_scaled_logits_are_refused():
    """A model that scales its logits is refused."""
    model = SimpleNamespace(logits_processor=SimpleNamespace(scale=0.5))
    with pytest.raises(ValueError, match="scales its logits"):
        head_of(model)


def test_never_drawn_ids_of_a_capped_model_are_refused():
    """Never-drawn ids of a model with capped logits are refused, as the cap would raise them."""
    with pytest.raises(ValueError, match=r"softcap=30.0 .* never_drawn=\(3,\)"):
        output_head(torch.zeros(8, 2), 30.0, never_drawn=(3,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("first_id", [0, 8])
def test_never_drawn_ids_are_overwritten_where_they_are(dtype, first_id):
    """Never-drawn ids are overwritten in their own tile and rank, with finite values."""
    never = (0, 3, 9, 14, 40)
    head = output_head(torch.ones(12, 2, dtype=dtype), first_id=first_id, never_drawn=never)
    ids = []
    for tile in head.tiles(4):
        logits = head.project(torch.ones(3, 2), tile)
        assert logits.dtype == dtype
        assert ((logits == 2.0) | (logits <= -65504.0)).all()
        assert (logits.float() / 1e-4).isfinite().all()
        assert torch.equal(logits, logits[:1].expand(3, -1))
        ids += [first_id + tile.start + i for i in (logits[0] < 0).nonzero()[:, 0].tolist()]
    assert ids == [token for token in never if first_id <= token < first_id + 12]


def test_a_view_with_gaps_is_summed_whole():
    """The sum over ranks is right for a view without the first column."""
    numbers = torch.arange(64 * 17).view(64, 17)

    def summed(head: OutputHead) -> torch.Tensor:
        return head.sum(numbers.clone()[:, 1:])

    for total in on_shards(torch.zeros(8, 1), [4], None, summed):
        assert torch.equal(total, 2 * numbers[:, 1:])
