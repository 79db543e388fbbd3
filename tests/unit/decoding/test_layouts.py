"""Tests of the answers of each layout of canvases, against loops over positions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.decoding.layouts import (
    AlignedBlock,
    AnswerSizes,
    BlockAfterPrompt,
    CanvasLayout,
    CausalDraft,
    FirstRows,
    FirstTokenBlock,
    FreeCanvas,
    GrowingSequence,
    ScheduledRequest,
    SequenceOfBlocks,
    ShiftedBlock,
    ShiftedSequence,
    VerifiedDraft,
    WholeSequence,
)

LENGTH = 4
SEQUENCES = (WholeSequence, ShiftedSequence, SequenceOfBlocks, GrowingSequence)
DRAFTS = (VerifiedDraft, CausalDraft)
LAYOUTS = (
    *(FreeCanvas, AlignedBlock, BlockAfterPrompt, FirstTokenBlock, ShiftedBlock),
    *DRAFTS,
    *SEQUENCES,
)
# Counted from position 0.
ALIGNED = (AlignedBlock, ShiftedBlock)
BLOCKS = (*ALIGNED, BlockAfterPrompt)


@pytest.mark.parametrize("layout", LAYOUTS)
@given(num_known=st.integers(0, 40))
def test_num_given(layout: type[CanvasLayout], num_known: int) -> None:
    """Given positions are the known tokens of an unfinished block or of a whole sequence."""
    expected = num_known if layout in SEQUENCES else 0
    while layout in ALIGNED and (num_known - expected) % LENGTH:
        expected += 1
    assert layout(LENGTH).num_given(num_known) == expected


@st.composite
def requests(draw: st.DrawFn) -> ScheduledRequest:
    """Draw a request as a scheduler may find it, within the model's length."""
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
    """A pass has known tokens alone, or all of them and a whole canvas that fits."""
    own = layout(LENGTH)
    rows = own.rows(request)
    if layout in SEQUENCES:
        fits = request.canvas_width <= request.num_left
        assert rows.num_rows == rows.num_added == (request.canvas_width if fits else 0)
        return
    to_encode = request.num_uncomputed - own.num_given(request.num_tokens)
    num_canvas = rows.num_rows - max(to_encode, 0)
    if rows.num_added:
        assert rows.num_added == num_canvas
        assert rows.num_rows <= request.num_left
    if num_canvas > 0:
        whole = LENGTH if layout in ALIGNED else request.canvas_width
        if layout not in BLOCKS:
            whole = min(whole, request.room)
        assert num_canvas >= whole > 0
        if layout in BLOCKS:
            assert num_canvas == whole
            assert request.num_computed + rows.num_rows <= request.max_model_len
    if layout in BLOCKS and num_canvas < 0:
        first = 0 if layout in ALIGNED else request.num_prompt % LENGTH
        ends = {0, *range(first, request.num_tokens + 1, LENGTH)}
        assert rows.num_rows == 0 or request.num_computed + rows.num_rows in ends


def loop_of_spans(num_tokens: int, first: int) -> list[tuple[int, int]]:
    """Return the block of each position; the first has ``first`` positions if that is not 0."""
    spans, start = [], 0
    while start < num_tokens:
        end = start + (LENGTH if start or not first else first)
        spans += [(start, end)] * (end - start)
        start = end
    return spans[:num_tokens]


@pytest.mark.parametrize("layout", LAYOUTS)
@given(num_prompt=st.integers(0, 12), num_generated=st.integers(0, 3))
def test_row_spans(layout: type[CanvasLayout], num_prompt: int, num_generated: int) -> None:
    """Known tokens attend in both directions within the blocks of their layout."""
    # Whole blocks follow a prompt, so that a preempted request has as long a first block as before.
    num_known = num_prompt + num_generated * LENGTH
    positions = torch.arange(num_known)
    spans = torch.full((num_known, 2), -1, dtype=torch.int32)
    known = torch.full((num_known,), num_known)
    found = layout(LENGTH).row_spans(positions, spans, lambda: known)
    if layout not in BLOCKS:
        assert found is None
        return
    first = 0 if layout in ALIGNED else num_prompt % LENGTH
    assert [tuple(span) for span in found.tolist()] == loop_of_spans(num_known, first)


@pytest.mark.parametrize("layout", [BlockAfterPrompt, *SEQUENCES])
@given(
    num_prompt=st.integers(1, 20),
    num_blocks=st.integers(0, 4),
    max_tokens=st.integers(1, 20),
    block_length=st.integers(1, LENGTH),
)
def test_width(
    layout: type[CanvasLayout], num_prompt: int, num_blocks: int, max_tokens: int, block_length: int
) -> None:
    """A canvas is as wide as its layout and the answer's end allow."""
    most = LENGTH if layout is BlockAfterPrompt else 32
    if layout is BlockAfterPrompt:
        block_length = LENGTH
    num_generated = min(num_blocks * block_length, max_tokens - 1)
    num_known = num_prompt + num_generated
    answer = AnswerSizes(None, num_prompt, num_known, max_tokens, block_length)
    width = layout(most).width(answer)
    end = num_prompt + max_tokens
    if layout is BlockAfterPrompt:
        assert width == min(LENGTH, end - num_known)
        return
    whole = num_prompt
    while whole < end:
        whole += block_length
    has_whole_blocks = layout in (SequenceOfBlocks, GrowingSequence) and whole <= most
    expected = whole if has_whole_blocks else min(end, most)
    if layout is GrowingSequence:
        expected = min(expected, num_known + block_length)
    assert width == expected


@given(st.lists(st.integers(0, LENGTH), min_size=1, max_size=3))
def test_emitted(num_given: list[int]) -> None:
    """A block or a sequence emits its tokens without the given ones; a free canvas has none."""
    result = torch.arange(len(num_given) * LENGTH).view(-1, LENGTH)
    for layout in (*BLOCKS, *SEQUENCES):
        emitted = layout(LENGTH).emitted(result, torch.tensor(num_given))
        for row, tokens, given_here in zip(result, emitted, num_given, strict=True):
            expected = row[given_here:].tolist()
            assert tokens[: len(expected)].tolist() == expected
    assert FreeCanvas(LENGTH).emitted(result, torch.tensor(num_given)) is result


def test_num_final() -> None:
    """A verified draft ends with the first disagreement, within the canvas's rows."""
    canvas = torch.tensor([[1, 2, 3, 4]] * 6)
    drawn = torch.tensor(
        [[2, 3, 4, 9], [2, 3, 4, 9], [2, 9, 4, 9], [9, 3, 4, 9], [2, 3, 4, 9], [2, 3, 4, 9]]
    )
    num_rows = torch.tensor([4, 3, 4, 4, 1, 0], dtype=torch.int32)
    for layout in DRAFTS:
        final = layout(LENGTH).num_final(canvas, drawn, num_rows)
        assert final.tolist() == [4, 3, 2, 1, 1, 1]
    for other in set(LAYOUTS) - {*DRAFTS}:
        assert other(LENGTH).num_final(canvas, drawn, num_rows) is num_rows


def test_shift() -> None:
    """A row draws the token of its own position or of a later one, by the state of its slot."""
    position = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 0])
    committed = torch.tensor([False] * 4 + [True] * 4 + [False])
    last_known = torch.tensor([False] * 8 + [True])
    first_rows = FirstRows(lambda: committed, lambda: last_known)
    found = {layout: layout(LENGTH).shift(position, first_rows).tolist() for layout in LAYOUTS}
    for layout in (FreeCanvas, AlignedBlock, BlockAfterPrompt, *SEQUENCES):
        assert found[layout] == [0] * 9
    assert found[FirstTokenBlock] == found[VerifiedDraft] == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert found[ShiftedBlock] == [LENGTH, 0, 0, 0, LENGTH, 0, 0, 0, 1]
    assert found[CausalDraft] == [1, 0, 0, 0, 1, 1, 1, 1, 1]


def test_drafted() -> None:
    """All rows of a draft are drafted, but for the first of a causal one; no other rows are."""
    position = torch.arange(LENGTH)
    for layout in LAYOUTS:
        expected = position >= {VerifiedDraft: 0, CausalDraft: 1}.get(layout, LENGTH)
        assert torch.equal(layout(LENGTH).drafted(position), expected)


def test_predicting_position() -> None:
    """The last emitted row of a canvas draws the first token of the next one."""
    num_final = torch.tensor([0, 1, 3, LENGTH], dtype=torch.int32)
    for layout in (FirstTokenBlock, *DRAFTS):
        assert layout(LENGTH).predicting_position(num_final).tolist() == [0, 0, 2, LENGTH - 1]
    assert ShiftedBlock(LENGTH).predicting_position(num_final).tolist() == [0] * 4
    for layout in (FreeCanvas, AlignedBlock, BlockAfterPrompt, *SEQUENCES):
        assert not layout.draws_first_token
