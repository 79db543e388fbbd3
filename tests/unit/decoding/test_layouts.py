"""What each layout of canvases answers, against loops over positions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.decoding.layouts import (
    AlignedBlock,
    BlockAfterPrompt,
    CanvasLayout,
    FreeCanvas,
    GrowingSequence,
    ScheduledRequest,
    SeededBlock,
    ShiftedBlock,
    ShiftedSequence,
    VerifiedDraft,
    WholeSequence,
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


@pytest.mark.parametrize("layout", [WholeSequence, ShiftedSequence])
@given(
    num_prompt=st.integers(1, 39),
    max_tokens=st.integers(1, 60),
    block_length=st.integers(1, 50),
    num_left=st.integers(0, 60),
)
def test_a_whole_sequence(
    layout: type[CanvasLayout],
    num_prompt: int,
    max_tokens: int,
    block_length: int,
    num_left: int,
) -> None:
    """Its canvas holds the prompt and the answer in whole blocks, as many as the model's length lets."""
    own = layout(40)
    width = own.width(None, num_prompt, num_prompt, max_tokens, block_length)
    growing = GrowingSequence(40)
    # It reaches the same width, a block at a time.
    known, widths = num_prompt, []
    while known < width:
        known = growing.width(None, num_prompt, known, max_tokens, block_length)
        widths.append(known)
    steps = [b - a for a, b in zip([num_prompt, *widths], widths, strict=False)]
    assert widths[-1] == width
    assert set(steps[:-1]) <= {block_length}
    room = 40 - num_prompt
    assert num_prompt < width <= 40
    if block_length > room:
        assert width - num_prompt == min(max_tokens, room)
    else:
        assert (width - num_prompt) % block_length == 0
        fits = -(-max_tokens // block_length) * block_length <= room
        assert (width - num_prompt >= max_tokens) if fits else (width + block_length > 40)
    request = ScheduledRequest(
        num_prompt=num_prompt,
        num_tokens=num_prompt,
        num_computed=0,
        num_uncomputed=num_prompt,
        num_granted=1,
        num_left=num_left,
        max_model_len=40,
        canvas_width=width,
        next_width=width,
        is_at_prompt=True,
        narrows_later=False,
        shares_prompt=True,
        shares_encode=True,
    )
    rows = own.rows(request)
    assert rows == ((width, width) if width <= num_left else (0, 0))


@given(
    num_prompt=st.integers(1, 40),
    num_blocks=st.integers(0, 3),
    num_computed=st.integers(0, 39),
    num_granted=st.integers(0, 60),
    num_left=st.integers(0, 60),
    max_tokens=st.integers(1, 30),
)
def test_blocks_after_the_prompt(
    num_prompt: int,
    num_blocks: int,
    num_computed: int,
    num_granted: int,
    num_left: int,
    max_tokens: int,
) -> None:
    """Known tokens end with a block of the prompt's count, and a canvas is as long as is wanted of it."""
    own = BlockAfterPrompt(LENGTH)
    num_known = num_prompt + num_blocks * LENGTH
    borders = {0, *range(num_prompt % LENGTH, num_known + 1, LENGTH)}
    num_computed = max(border for border in borders if border <= num_computed)
    width = own.width(None, num_prompt, num_known, num_blocks * LENGTH + max_tokens, LENGTH)
    assert width == min(LENGTH, max_tokens)
    request = ScheduledRequest(
        num_prompt=num_prompt,
        num_tokens=num_known,
        num_computed=num_computed,
        num_uncomputed=num_known - num_computed,
        num_granted=num_granted,
        num_left=num_left,
        max_model_len=1000,
        canvas_width=width,
        next_width=width,
        is_at_prompt=num_blocks == 0,
        narrows_later=False,
        shares_prompt=True,
        shares_encode=True,
    )
    rows = own.rows(request)
    assert rows.num_rows <= num_left
    assert num_computed + rows.num_rows - rows.num_added in borders
    if rows.num_added:
        assert rows.num_added == width
        assert num_computed + rows.num_rows - width == num_known

    positions = torch.arange(num_known + width)
    spans = torch.zeros(len(positions), 2, dtype=torch.int32)
    own.row_spans(positions, spans, lambda: torch.full_like(positions, num_prompt))
    block = (positions - num_prompt).div(LENGTH, rounding_mode="floor")
    for at, (first, end) in enumerate(spans.tolist()):
        same = positions[block == block[at]]
        assert first == int(same[0])
        assert end > int(same[-1])
