"""The rows that the device lays out are those that loops over requests on the host find."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.canvas.slots import CanvasSlots, Phase
from vllm_diffusion.canvas.step import StepOutput
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.layouts import (
    AlignedBlock,
    BlockAfterPrompt,
    CanvasLayout,
    CausalDraft,
    FirstTokenBlock,
    FreeCanvas,
    GrowingSequence,
    SequenceOfBlocks,
    ShiftedBlock,
    ShiftedSequence,
    VerifiedDraft,
    WholeSequence,
)
from vllm_diffusion.decoding.reveal import LinearSpec

SLOTS, LENGTH, ROWS, VOCAB = 5, 4, 48, 1000
CPU = torch.device("cpu")

# A request: rows that are known tokens, canvas rows, tokens computed before, and its prompt's
# length.
requests = st.tuples(
    st.integers(0, 4), st.integers(0, LENGTH), st.integers(0, 9), st.integers(1, 12)
).filter(lambda r: r[0] + r[1] > 0)
batches = st.lists(requests, min_size=1, max_size=SLOTS)


def spec_of(layout: type[CanvasLayout]) -> Any:
    return CanvasSpec.of(layout(LENGTH), LinearSpec(), 3, {})


def batch_of(chosen: list[tuple[int, int, int, int]], slots: list[int]) -> SimpleNamespace:
    """Return a batch as the runner makes it."""
    n = len(chosen)
    known, canvas, computed, prompt = (np.array(column) for column in zip(*chosen, strict=True))
    scheduled = known + canvas
    starts = np.concatenate([[0], np.cumsum(scheduled)]).astype(np.int32)
    computed_of_prompt = np.minimum(computed, prompt)
    # The rest of the runner's tensor, with what an earlier pass left.
    ids = torch.arange(ROWS, dtype=torch.int32) + 5000
    return SimpleNamespace(
        num_reqs=n,
        num_tokens=int(starts[-1]),
        idx_mapping_np=np.array(slots[:n]),
        cu_num_logits_np=np.concatenate([[0], np.cumsum(canvas)]).astype(np.int32),
        num_computed_prefill_tokens_np=computed_of_prompt,
        num_scheduled_tokens=scheduled,
        prefill_len_np=prompt,
        is_prefilling_np=computed_of_prompt < prompt,
        query_start_loc_np=starts,
        input_ids=ids[: int(starts[-1])],
    )


@pytest.mark.parametrize(
    ("layout", "is_block_causal", "draws_first_token", "is_shifted"),
    [
        (FreeCanvas, False, False, False),
        (AlignedBlock, True, False, False),
        (BlockAfterPrompt, True, False, False),
        (FirstTokenBlock, False, True, False),
        (VerifiedDraft, False, True, False),
        (CausalDraft, False, True, True),
        (ShiftedBlock, True, True, True),
    ],
)
@given(
    chosen=batches,
    slots=st.permutations(range(SLOTS)),
    committing=st.lists(st.booleans(), min_size=SLOTS, max_size=SLOTS),
    compiled=st.booleans(),
)
def test_lay_out(
    layout, is_block_causal, draws_first_token, is_shifted, chosen, slots, committing, compiled
):
    """The rows of a pass are those of a loop over its requests, eager or compiled."""
    spec = spec_of(layout)
    canvases = CanvasSlots(SLOTS, spec, 40, CPU)
    canvases.phase.copy_(
        torch.tensor([Phase.COMMITTING if c else Phase.DENOISING for c in committing])
    )
    canvases.canvas.copy_(torch.arange(SLOTS * LENGTH).view(SLOTS, LENGTH))
    # As compiled functions are called: with every row that a pass may have.
    rows = PassRows(canvases, ROWS, "eager" if compiled else None)
    rows._spread, rows._fill, rows._select = (
        rows._spread_over_rows,
        rows._fill_ids,
        rows._by_request,
    )
    batch = batch_of(chosen, slots)
    # What an earlier pass left.
    for tensor in (rows.index, rows.slot, rows.position, rows.offset):
        tensor.fill_(3)
    rows._held.fill_(7)
    rows.lay_out(batch)

    all_ids = torch.arange(SLOTS * 30).view(SLOTS, 30).to(torch.int32) + 100
    num_computed = torch.zeros(SLOTS, dtype=torch.int32)
    before = batch.input_ids.clone()
    expected_ids = before.clone()
    causal, flags = np.zeros(SLOTS), np.zeros(SLOTS)
    num_rows, last_known = np.zeros(SLOTS), np.zeros(SLOTS)
    found: list[tuple[int, int, int, int, int]] = []
    for i, (known, canvas, computed, prompt) in enumerate(chosen):
        slot, first = slots[i], int(batch.query_start_loc_np[i])
        num_computed[slot] = computed
        is_prefilling = min(computed, prompt) < prompt
        is_over = canvas == 0 and min(computed, prompt) + known >= prompt
        bidirectional = canvas
        if layout is CausalDraft or (not is_block_causal and committing[slot]):
            bidirectional = 0
        causal[i], flags[i] = known + canvas - bidirectional, bidirectional == 0
        num_rows[slot] = canvas
        for j in range(canvas):
            at = first + known + j
            shifted = at + LENGTH - 1 if j == 0 else at - 1
            if layout is CausalDraft and (j == 0 or committing[slot]):
                shifted = at
            hidden = shifted if is_shifted else at
            found.append((slot, j, at, at - first, hidden))
            expected_ids[at] = canvases.canvas[slot, j]
        if draws_first_token and is_over:
            last_known[slot] = 1
            at = first + known - 1
            found.append((slot, 0, at, known - 1, at))
        if not is_prefilling:
            for j in range(known):
                expected_ids[first + j] = all_ids[slot, computed + j]
    n = len(found)
    assert rows.num_rows == n
    of_rows = (rows.slot, rows.position, rows.index, rows.offset, rows.hidden_index)
    assert [tuple(int(column[i]) for column in of_rows) for i in range(n)] == found
    assert rows.num_causal.tolist() == causal.tolist()
    assert rows.causal_flags.tolist() == flags.tolist()
    told = rows.of_slots
    assert told.num_rows.tolist() == num_rows.tolist()
    assert told.last_known.tolist() == last_known.astype(bool).tolist()
    assert told.num_valid.tolist() == [-1] * SLOTS
    assert told.free_from.tolist() == told.free_to.tolist() == [0] * SLOTS

    rows.fill_ids(batch, all_ids, num_computed)
    assert batch.input_ids.tolist() == expected_ids.tolist()
    behind = batch.input_ids.as_strided((ROWS - len(before),), (1,), len(before))
    assert behind.tolist() == list(range(5000 + len(before), 5000 + ROWS))

    output = StepOutput(
        canvases.canvas, torch.arange(SLOTS), torch.arange(SLOTS).to(torch.int32), *[None] * 7
    )
    engine = rows.for_engine(output)
    for i, (_, canvas, _, _) in enumerate(chosen):
        assert engine.tokens[i].tolist() == canvases.canvas[slots[i]].tolist()
        assert int(engine.num_sampled[i]) == slots[i]
        assert int(engine.num_rejected[i]) == canvas - slots[i]
    assert len(engine.num_sampled) == len(chosen)

    rows.clear()
    assert rows.num_rows == 0
    assert not any(x.any() for x in (told.num_rows, told.last_known))
    assert told.num_valid.tolist() == [-1] * SLOTS


@pytest.mark.parametrize(
    "layout", [WholeSequence, ShiftedSequence, SequenceOfBlocks, GrowingSequence]
)
@given(
    # Of each request its prompt's tokens, what it has emitted, and positions after its answer.
    chosen=st.lists(
        st.tuples(st.integers(1, LENGTH), st.integers(0, LENGTH), st.integers(0, LENGTH)),
        min_size=1,
        max_size=SLOTS,
    ),
    slots=st.permutations(range(SLOTS)),
    block=st.integers(1, LENGTH),
)
def test_lay_out_of_sequences(layout, chosen, slots, block):
    """The block of a sequence after its given positions is sampled, by its layout's shift."""
    canvases = CanvasSlots(SLOTS, spec_of(layout), 40, CPU)
    canvases.block_length[:] = block
    # Prompt and what was emitted, an answer of at least one more position, and what follows it.
    lengths = [prompt + emitted + 1 + after for prompt, emitted, after in chosen]
    batch = batch_of(
        [(0, length, 0, prompt) for length, (prompt, _, _) in zip(lengths, chosen, strict=True)],
        slots,
    )
    for i, (prompt, emitted, after) in enumerate(chosen):
        canvases.num_after[slots[i]] = after
        canvases.num_given[slots[i]] = prompt + emitted
    rows = PassRows(canvases, ROWS, None)
    rows.lay_out(batch)
    expected, causal = [], []
    for i, (prompt, emitted, after) in enumerate(chosen):
        first, answer = int(batch.query_start_loc_np[i]), lengths[i] - after
        # The host knows no more of a block in flight than its first position: rows may come twice.
        for j in range(min(block, answer - prompt)):
            position = min(prompt + emitted + j, lengths[i] - 1)
            at = first + position
            hidden = at - 1 if layout is ShiftedSequence else at
            expected.append((slots[i], position, at, position, hidden))
        causal.append(0)
    of_rows = (rows.slot, rows.position, rows.index, rows.offset, rows.hidden_index)
    n = len(expected)
    assert rows.num_rows == n
    assert [tuple(int(column[i]) for column in of_rows) for i in range(n)] == expected
    assert rows.num_causal[: len(chosen)].tolist() == causal


def test_searches_whole_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.11 compiles a search in a slice for a GPU as one in the whole tensor."""
    searched: list[torch.Tensor] = []
    search = torch.searchsorted

    def noted(sequence: torch.Tensor, *inputs: Any, **options: Any) -> torch.Tensor:
        searched.append(sequence)
        return search(sequence, *inputs, **options)

    monkeypatch.setattr(torch, "searchsorted", noted)
    rows = PassRows(CanvasSlots(SLOTS, spec_of(FreeCanvas), 40, CPU), ROWS, None)
    batch = batch_of([(2, 4, 0, 2)], list(range(SLOTS)))
    rows.lay_out(batch)
    rows.fill_ids(batch, torch.zeros(SLOTS, 30), torch.zeros(SLOTS, dtype=torch.int32))
    # The views that graphs are compiled for, and no view made inside of a function.
    held = [rows._numbers.row_start, rows._numbers.query_start]
    assert all(found is whole for found, whole in zip(searched, held, strict=True))
