"""What each layout of canvases answers, against loops over positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.decoding.layouts import (
    AlignedBlock,
    CanvasLayout,
    FreeCanvas,
    ScheduledRequest,
    SeededBlock,
    ShiftedBlock,
    VerifiedDraft,
)

LENGTH = 4
LAYOUTS = (FreeCanvas, AlignedBlock, SeededBlock, ShiftedBlock, VerifiedDraft)
BLOCKS = (AlignedBlock, ShiftedBlock)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(num_known=st.integers(0, 40))
def test_num_given(layout: type[CanvasLayout], num_known: int) -> None:
    """Of blocks counted from 0, what the known tokens leave of their last one; else none."""
    expected = 0
    while layout in BLOCKS and (num_known - expected) % LENGTH:
        expected += 1
    assert layout(LENGTH).num_given(num_known) == expected


@st.composite
def requests(draw: st.DrawFn) -> ScheduledRequest:
    """A request as a scheduler may find it; nothing in it is beyond the model's length."""
    num_computed = draw(st.integers(0, 6)) * LENGTH
    num_uncomputed = draw(st.integers(0, 9))
    room = draw(st.integers(0, 10))
    return ScheduledRequest(
        num_prompt=num_computed + num_uncomputed,
        num_tokens=num_computed + num_uncomputed,
        num_computed=num_computed,
        num_uncomputed=num_uncomputed,
        num_granted=draw(st.integers(0, num_uncomputed + min(LENGTH, room))),
        num_left=draw(st.integers(0, 24)),
        max_model_len=num_computed + num_uncomputed + room,
        canvas_width=draw(st.integers(1, LENGTH)),
        next_width=LENGTH,
        is_at_prompt=draw(st.booleans()),
        narrows_later=draw(st.booleans()),
        shares_prompt=draw(st.booleans()),
        shares_encode=draw(st.booleans()),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@given(request=requests())
def test_a_canvas_runs_whole_or_not_at_all(
    layout: type[CanvasLayout], request: ScheduledRequest
) -> None:
    """Rows are known tokens alone, or all of them and a whole canvas within what is left."""
    own = layout(LENGTH)
    rows = own.rows(request)
    to_encode = request.num_uncomputed - own.num_given(request.num_tokens)
    num_canvas = rows.num_rows - max(to_encode, 0)
    if rows.num_added:
        assert rows.num_added == num_canvas
        assert rows.num_rows <= request.num_left
    if num_canvas > 0:
        whole = LENGTH if layout in BLOCKS else min(request.canvas_width, request.room)
        assert num_canvas >= whole > 0
        if layout in BLOCKS:
            assert num_canvas == LENGTH
            assert request.num_computed + rows.num_rows <= request.max_model_len
    if layout in BLOCKS and num_canvas < 0:
        assert rows.num_rows % LENGTH == 0


@given(st.lists(st.integers(0, LENGTH), min_size=1, max_size=3))
def test_emitted(num_given: list[int]) -> None:
    """A block's tokens without those that were given."""
    result = torch.arange(len(num_given) * LENGTH).view(-1, LENGTH)
    emitted = AlignedBlock(LENGTH).emitted(result, torch.tensor(num_given))
    for row, tokens, given_here in zip(result, emitted, num_given, strict=True):
        expected = row[given_here:].tolist()
        assert tokens[: len(expected)].tolist() == expected
    assert FreeCanvas(LENGTH).emitted(result, torch.tensor(num_given)) is result


def test_num_final() -> None:
    """Up to the first disagreement, whatever agrees behind it, and never beyond the canvas's rows."""
    canvas = torch.tensor([[1, 2, 3, 4]] * 6)
    drawn = torch.tensor(
        [[2, 3, 4, 9], [2, 3, 4, 9], [2, 9, 4, 9], [9, 3, 4, 9], [2, 3, 4, 9], [2, 3, 4, 9]]
    )
    num_rows = torch.tensor([4, 3, 4, 4, 1, 0], dtype=torch.int32)
    final = VerifiedDraft(LENGTH).num_final(canvas, drawn, num_rows)
    assert final.tolist() == [4, 3, 2, 1, 1, 1]
    for other in (FreeCanvas, AlignedBlock, SeededBlock, ShiftedBlock):
        assert other(LENGTH).num_final(canvas, drawn, num_rows) is num_rows


def test_shift() -> None:
    """Where the token of a row goes: of a canvas in mid-air, of a committed one, of the known tokens before."""
    position = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0])
    committed = torch.tensor([False] * 4 + [True] * 4 + [False])
    seeding = torch.tensor([False] * 8 + [True])
    found = {
        layout: layout(LENGTH).shift(position, lambda: committed, lambda: seeding).tolist()
        for layout in LAYOUTS
    }
    assert found[FreeCanvas] == found[AlignedBlock] == [0] * 9
    assert found[SeededBlock] == found[VerifiedDraft] == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert found[ShiftedBlock] == [LENGTH, 0, 0, 0, LENGTH, 0, 0, 0, 1]


def test_seed_position() -> None:
    """The row of a committed canvas whose token is the next one's first."""
    num_final = torch.tensor([0, 1, 3, LENGTH], dtype=torch.int32)
    for layout in (SeededBlock, VerifiedDraft):
        assert layout(LENGTH).seed_position(num_final).tolist() == [0, 0, 2, LENGTH - 1]
    assert ShiftedBlock(LENGTH).seed_position(num_final).tolist() == [0] * 4
    for layout in (FreeCanvas, AlignedBlock):
        assert not layout.starts_from_commit
