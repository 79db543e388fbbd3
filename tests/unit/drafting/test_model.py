"""The passes of :class:`DFlashMaskedDraftModel`, with a layer of a few lines."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support.counters.device_waits import DeviceWaits
from vllm_diffusion.drafting.reveal_block import CONFIDENCE, ORDERS, SCHEDULES, unmask_counts

pytestmark = pytest.mark.engine

VOCAB, MASK, HIDDEN = 9, 8, 16


class Layer(nn.Module):
    """A layer whose rows depend on their token, their position, and all tokens of their block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        generator = torch.Generator().manual_seed(width)
        self.table = torch.randn(VOCAB, HIDDEN, generator=generator)

    def forward(self, input_ids: Tensor, positions: Tensor, _: Tensor | None) -> Tensor:
        rows = self.table[input_ids.long()]
        of_block = rows.shape[0] // self.width * self.width
        blocks = rows[:of_block].view(of_block // self.width, self.width, HIDDEN)
        mixed = blocks + torch.sin(3 * blocks.sum(dim=1, keepdim=True))
        where = torch.cos(positions[:, None] * torch.arange(1, HIDDEN + 1))
        return torch.cat([mixed.flatten(0, 1), rows[of_block:]]) + where


def draft(num_drafts: int, steps: int, schedule: str, order: str) -> nn.Module:
    from vllm_diffusion.drafting.model import DFlashMaskedDraftModel

    class Draft(DFlashMaskedDraftModel):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.model = Layer(num_drafts + 1)
            self.lm_head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))
            # The likeliest everywhere, if it could be.
            self.lm_head[MASK] *= 9
            self.logits_processor = lambda head, rows: rows @ head.T
            self.draft_id_to_target_id = None
            self.num_drafts, self.order, self.mask_token_id = num_drafts, order, MASK
            self.unmask_counts = unmask_counts(num_drafts, steps, schedule)

    return Draft()


def by_hand(model: nn.Module, anchor: int, positions: Tensor) -> Tensor:
    """Return a block's kept rows, computed position by position."""
    tokens = [anchor, *[MASK] * model.num_drafts]
    kept: dict[int, Tensor] = {}
    for count in model.unmask_counts:
        rows = model.model(torch.tensor(tokens), positions, None)
        probabilities = model.compute_logits(rows).softmax(dim=-1)
        left = [i for i in range(1, len(tokens)) if i not in kept]
        if model.order == CONFIDENCE:
            left.sort(key=lambda i: -float(probabilities[i].max()))
        for i in left[:count]:
            kept[i], tokens[i] = rows[i], int(probabilities[i].argmax())
    return torch.stack([kept[i] for i in sorted(kept)])


@given(
    data=st.data(),
    num_drafts=st.integers(1, 6),
    num_blocks=st.integers(0, 4),
    padding=st.integers(0, 2),
    schedule=st.sampled_from(list(SCHEDULES)),
    order=st.sampled_from(ORDERS),
)
def test_passes(
    data: st.DataObject, num_drafts: int, num_blocks: int, padding: int, schedule: str, order: str
) -> None:
    """Each block's rows equal those of the block alone, the engine's token ids are not changed, and
    the mask is never proposed.
    """
    model = draft(num_drafts, data.draw(st.integers(1, num_drafts)), schedule, order)
    width = num_drafts + 1
    padding = min(padding, num_drafts)
    anchors = data.draw(
        st.lists(st.integers(0, VOCAB - 1), min_size=num_blocks, max_size=num_blocks)
    )
    blocks = [[anchor, *[MASK] * num_drafts] for anchor in anchors]
    ids = torch.tensor([*sum(blocks, []), *[0] * padding], dtype=torch.int32)
    positions = torch.randint(0, 50, ids.shape)
    given_ids = ids.clone()
    rows = model(ids, positions)
    assert rows.shape == (len(ids), HIDDEN)
    assert torch.equal(ids, given_ids)
    for block, anchor in enumerate(anchors):
        of_block = slice(block * width, (block + 1) * width)
        expected = by_hand(model, anchor, positions[of_block])
        torch.testing.assert_close(rows[of_block][1:], expected)
        assert MASK not in model.compute_logits(rows[of_block]).argmax(dim=-1)


@pytest.mark.parametrize("order", ORDERS)
def test_a_graph_can_hold_the_passes(order: str) -> None:
    """The passes can be traced as a whole for any number of blocks, and no operation waits for the
    device.
    """
    model = draft(4, 3, "cosine", order)

    def rows_of(ids: Tensor, positions: Tensor) -> Tensor:
        return model(ids.flatten(), positions.flatten())

    def inputs(num_blocks: int) -> tuple[Tensor, Tensor]:
        ids = torch.full((num_blocks, 5), MASK, dtype=torch.int32)
        ids[:, 0] = torch.arange(num_blocks)
        return ids, torch.arange(5 * num_blocks).view(num_blocks, 5)

    traced = make_fx(rows_of, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs(2))
    torch.testing.assert_close(traced(*inputs(5)), rows_of(*inputs(5)))
    with DeviceWaits(()) as waits:
        rows_of(*inputs(3))
    assert waits.found == []
