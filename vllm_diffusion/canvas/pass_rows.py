"""Places of the rows of a pass, at addresses that never change.

The host knows where rows are; only the device knows which canvases are being committed. One copy
takes the host's part to the device, and one function makes of it what attention, the embedding and
the sampler read, so that graphs of them need no inputs of their own.

:meth:`PassRows.lay_out` runs in ``prepare_attn`` of the model state, before anything of a pass is
launched: the runner calls it before ``prepare_inputs``, the forward pass and the sampler, which
read what it laid out.

R is the number of slots, C the canvas length, N the most rows of a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_diffusion.canvas.compiled import compiled
from vllm_diffusion.canvas.slots import CanvasSlots, Phase
from vllm_diffusion.canvas.step import SlotInputs, StepOutput
from vllm_diffusion.decoding.layouts import FirstRows

Table = TypeVar("Table", bound="tuple[Any, ...]")


def rows_of(table: Table, rows: slice | Tensor | tuple[Tensor, ...]) -> Table:
    """Select rows of all tensors of a named tuple; its other fields stay.

    Args:
        table: Named tuple of tensors with an entry for each row.
        rows: Which rows, in their order in the result; several tensors index as many dimensions.
    """
    return type(table)(*(x[rows] if isinstance(x, Tensor) else x for x in table))


class _Numbers(NamedTuple):
    """Numbers that the host knows of requests, in the batch's order, or of slots.

    The host makes them as NumPy arrays; on the device they are tensors.

    Attributes:
        slot: [R + 1], int32 as all of them, the slot of each request.
        query_start: [R + 1], the first row of each request in the pass, and after the last one the
            number of rows.
        row_start: [R + 1], the same among the rows that are sampled.
        num_canvas: [R + 1], canvas rows of each request.
        num_known: [R + 1], tokens of each request's prompt, and what it had generated when it was
            preempted.
        is_encoding: [R + 1], whether its other rows are tokens of a finished canvas.
        num_rows: [R + 1], canvas rows of each slot.
        num_valid: [R + 1], of slots, as in :class:`SlotInputs`. This and the next two start at
            their values without a constraint; the sampler overwrites them.
        free_from: [R + 1].
        free_to: [R + 1].
        last_known: [R + 1], of which the first R bytes are bool: slots of which the row of the last
            known token is sampled, which draws their canvas's first token.
    """

    slot: Any
    query_start: Any
    row_start: Any
    num_canvas: Any
    num_known: Any
    is_encoding: Any
    num_rows: Any
    num_valid: Any
    free_from: Any
    free_to: Any
    last_known: Any


def _last_at(starts: Tensor, row: Tensor) -> Tensor:
    """[N], int64: for each row the last of ``starts`` that is not after it.

    Search all of ``starts``, never a slice: for a GPU, PyTorch 2.11 compiles a search in a slice as
    one in the whole tensor, and every row then gets the next request's tokens.

    Args:
        starts: [R + 1], ascending from 0.
        row: [N], none of them negative.
    """
    return torch.searchsorted(starts, row, right=True) - 1


class EngineRows(NamedTuple):
    """Outcome of a pass for the engine, by request; new tensors, since it copies them in its own
    time.

    Attributes:
        tokens: [num_reqs, C], int32.
        num_sampled: [num_reqs], int32: how many of them are emitted.
        num_rejected: [num_reqs], int32: canvas rows whose keys and values are not final, so that
            vLLM runs their positions again: all of them, unless this pass wrote final ones.
    """

    tokens: Tensor
    num_sampled: Tensor
    num_rejected: Tensor


class BatchRequests(NamedTuple):
    """Requests of a pass in the batch's order, on the host.

    Attributes:
        slots: [num_reqs], int64.
        starts: [num_reqs + 1], int64: the first row of each request among those sampled, and after
            the last one the number of rows.
        last_known: [num_reqs], bool: requests of which the row of the last known token is sampled.
    """

    slots: np.ndarray
    starts: np.ndarray
    last_known: np.ndarray

    @staticmethod
    def none() -> BatchRequests:
        """A pass without requests."""
        return BatchRequests(
            np.zeros(0, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(0, dtype=bool)
        )

    @property
    def num_rows(self) -> np.ndarray:
        """[num_reqs], int64: sampled rows of each request."""
        return np.diff(self.starts)

    def rows_of(self, chosen: np.ndarray) -> np.ndarray | None:
        """[n], int64, ascending: sampled rows of some requests.

        Args:
            chosen: [num_reqs], bool.

        Returns:
            ``None`` where there are no such requests or they are still at their prompts.
        """
        if not chosen.any():
            return None
        index = np.flatnonzero(np.repeat(chosen, self.num_rows))
        return index if index.size > 0 else None


class PassRows:
    """Rows of the pass that :meth:`lay_out` was last called for.

    Sampled are canvas rows, or those among them that the layout chooses. Where the encoding pass
    draws the first token of a canvas (``CanvasLayout.draws_first_token``), the row of a request's
    last known token is sampled too: to the sampler that is a canvas of one row.

    Attributes:
        slots: The canvases.
        num_causal: [R], int32: leading rows of each request that attend causally, those of prompts
            and of finished canvases; a padding request has none. Rows of a canvas that is denoised
            attend in both directions.
        causal_flags: [R], int32, the same as a flag, for back ends that know only those: for them
            the scheduler never has a request do both in one pass.
        index: [N], int64: the place of each sampled row in the pass; 0 after the last.
        hidden_index: [N], int64: the place of the hidden state that its token is drawn from.
        slot: [N], int64: its slot.
        position: [N], int64: its position in its canvas.
        offset: [N], int64: rows from the first of its request to it.
        of_slots: The decision's inputs, as if there were no constraints; the sampler fills in the
            requests' seeds.
        requests: Requests of the pass, on the host.
        compile_backend: Backend of ``torch.compile`` for the small functions of a pass; ``None``
            runs them eagerly.
    """

    def __init__(self, slots: CanvasSlots, max_rows: int, compile_backend: str | None) -> None:
        """Allocate for the largest pass.

        Args:
            slots: The canvases.
            max_rows: Rows of the largest pass.
            compile_backend: Backend of ``torch.compile``, which makes one or two launches of each
                function; ``None`` runs its operations one by one.
        """
        self.slots = slots
        self.compile_backend = compile_backend
        R, N, device = slots.num_slots, max_rows, slots.device
        # Compiled for the largest pass, so that it is compiled once; else as long as the pass is.
        self._most = None if compile_backend is None else N
        self._held = torch.zeros(len(_Numbers._fields), R + 1, dtype=torch.int32, device=device)
        self._numbers = _Numbers(*self._held)

        def integers(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.num_causal = integers(R, torch.int32)
        self.causal_flags = integers(R, torch.int32)
        self.index = integers(N)
        self.slot = integers(N)
        self.position = integers(N)
        self.offset = integers(N)
        self.hidden_index = integers(N) if slots.spec.layout.predicts_next else self.index
        self._of_rows = (self.index, self.hidden_index, self.slot, self.position, self.offset)
        numbers = self._numbers
        # What needs no arithmetic is read where it was copied to.
        self.of_slots = SlotInputs(
            num_rows=numbers.num_rows[:R],
            seed=integers(R),
            greedy=integers(R, torch.bool),
            last_known=numbers.last_known.view(torch.bool)[:R],
            num_valid=numbers.num_valid[:R],
            free_from=numbers.free_from[:R],
            free_to=numbers.free_to[:R],
        )
        self.requests = BatchRequests.none()
        self._spread = compiled(self._spread_over_rows, compile_backend)
        self._fill = compiled(self._fill_ids, compile_backend)
        self._select: Callable[[Tensor, Tensor, Tensor], EngineRows] = compiled(
            self._by_request, compile_backend
        )

    @property
    def num_rows(self) -> int:
        """Rows that are sampled."""
        return int(self.requests.starts[-1])

    @property
    def of_constraints(self) -> Tensor:
        """[3, R], int32: the last three fields of ``of_slots``, which constraints fill."""
        first = _Numbers._fields.index("num_valid")
        return self._held[first : first + 3, : self.slots.num_slots]

    def lay_out(self, input_batch: InputBatch) -> None:
        """Lay out the batch of a pass, in ``prepare_attn``, before anything of the pass is
        launched.
        """
        n, num_slots = input_batch.num_reqs, self.slots.num_slots
        slots = input_batch.idx_mapping_np[:n].astype(np.int64)
        num_canvas = np.diff(input_batch.cu_num_logits_np[: n + 1]).astype(np.int64)
        is_over = (
            input_batch.num_computed_prefill_tokens_np[:n] + input_batch.num_scheduled_tokens[:n]
            >= input_batch.prefill_len_np[:n]
        ) & (num_canvas == 0)
        # A finished canvas that the token budget cuts counts with each of its parts: the last one's
        # row is read before a canvas is.
        last_known = is_over & self.slots.draws_first_token[slots]
        num_answer = np.maximum(num_canvas - self.slots.num_after[slots], 0)
        num_sampled = self.slots.spec.layout.num_sampled(
            num_answer, input_batch.prefill_len_np[:n], self.slots.block_length[slots]
        )
        starts = np.concatenate([[0], np.cumsum(num_sampled + last_known)])
        self.requests = BatchRequests(slots, starts, last_known)

        held = np.zeros((len(_Numbers._fields), num_slots + 1), dtype=np.int32)
        numbers = _Numbers(*held)
        numbers.slot[:n] = slots
        numbers.query_start[: n + 1] = input_batch.query_start_loc_np[: n + 1]
        numbers.query_start[n + 1 :] = input_batch.query_start_loc_np[n]
        numbers.row_start[: n + 1] = starts
        numbers.row_start[n + 1 :] = starts[n]
        numbers.num_canvas[:n] = num_canvas
        numbers.num_known[:n] = input_batch.prefill_len_np[:n]
        numbers.is_encoding[:n] = ~input_batch.is_prefilling_np[:n]
        numbers.num_rows[slots] = num_answer
        numbers.last_known.view(np.bool_)[slots] = last_known
        numbers.num_valid.fill(-1)
        async_tensor_h2d(held, out=self._held)
        rows = slice(self._most or self.num_rows)
        self._spread(*(of_row[rows] for of_row in self._of_rows))

    def num_known(self, num_tokens: int) -> Tensor:
        """[num_tokens], int32: of each row's request, its prompt and what it had generated when
        preempted.

        Args:
            num_tokens: Rows of the pass, those after the last request among them.
        """
        numbers = self._numbers
        row = torch.arange(num_tokens, dtype=torch.int32, device=self.index.device)
        request = _last_at(numbers.query_start, row).clamp(max=self.slots.num_slots - 1)
        return numbers.num_known[request]

    def clear(self) -> None:
        """Lay out a pass without requests: what is run then changes no canvas."""
        self._held.zero_()
        self._numbers.num_valid.fill_(-1)
        self.requests = BatchRequests.none()
        for of_row in self._of_rows:
            of_row.zero_()

    def _spread_over_rows(
        self,
        index: Tensor,
        hidden_index: Tensor,
        slot: Tensor,
        position: Tensor,
        offset: Tensor,
    ) -> None:
        """Spread the host's numbers over requests and rows; every argument is filled, [N] int64."""
        numbers, slots, layout = self._numbers, self.slots, self.slots.spec.layout
        R = slots.num_slots
        query_lens = numbers.query_start[1:] - numbers.query_start[:-1]

        def is_committed(slot: Tensor) -> Tensor:
            return slots.phase[slot] == int(Phase.COMMITTING)

        num_bidirectional = layout.num_bidirectional(
            numbers.num_canvas[:R], lambda: is_committed(numbers.slot[:R].long())
        )
        self.num_causal.copy_(query_lens - num_bidirectional)
        self.causal_flags.copy_((num_bidirectional == 0) & (query_lens > 0))

        row = torch.arange(len(index), dtype=torch.int32, device=index.device)
        is_row = row < numbers.row_start[R]
        request = _last_at(numbers.row_start, row).clamp(max=R - 1)
        slot.copy_(torch.where(is_row, numbers.slot[request], 0))
        within = row - numbers.row_start[request] + layout.first_sampled(slots.num_given[slot])
        # The rows of a canvas are the last ones of their request, and so is the row of the last
        # known token.
        start, end = numbers.query_start[request], numbers.query_start[request + 1]
        num_canvas = numbers.num_canvas[request].clamp(min=1)
        # The host counts rows of a block that the device may have emitted since.
        within = torch.minimum(within, num_canvas - 1)
        at = end - num_canvas + within
        index.copy_(torch.where(is_row, at, 0))
        position.copy_(torch.where(is_row, within, 0))
        offset.copy_(torch.where(is_row, at - start, 0))
        if layout.predicts_next:
            first = FirstRows(lambda: is_committed(slot), lambda: self.of_slots.last_known[slot])
            shift = layout.shift(within, first)
            hidden_index.copy_(torch.where(is_row, at + shift - 1, 0))

    def fill_ids(
        self, input_batch: InputBatch, all_token_ids: Tensor, num_computed: Tensor
    ) -> None:
        """Put canvases, and finished canvases before them, into a batch's token ids.

        The runner leaves nothing of meaning in either. :meth:`lay_out` comes first.

        Args:
            input_batch: The one that was laid out.
            all_token_ids: [R, max_model_len], int32: known tokens of each slot.
            num_computed: [R], int32: how many of them each slot had before the pass.
        """
        ids = input_batch.input_ids[: input_batch.num_tokens]
        if self._most is not None:
            # The runner hands out its longer buffer in no other way, and a compiled function takes
            # one length.
            ids = ids.as_strided((self._most,), (1,), ids.storage_offset())
        self._fill(ids, all_token_ids, num_computed)

    def _fill_ids(self, ids: Tensor, all_token_ids: Tensor, num_computed: Tensor) -> None:
        numbers, canvas = self._numbers, self.slots.canvas
        row = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        R, C = canvas.shape
        request = _last_at(numbers.query_start, row).clamp(max=R - 1)
        slot = numbers.slot[request].long()
        within = row - numbers.query_start[request]
        num_others = numbers.query_start[request + 1] - numbers.query_start[request]
        position = within - (num_others - numbers.num_canvas[request])
        known_at = (num_computed[slot] + within).clamp(0, all_token_ids.shape[1] - 1)
        known = all_token_ids[slot, known_at.long()].to(ids.dtype)
        drawn = canvas[slot, position.clamp(0, C - 1).long()].to(ids.dtype)
        token = torch.where(numbers.is_encoding[request] > 0, known, ids)
        token = torch.where(position >= 0, drawn, token)
        ids.copy_(torch.where(row < numbers.query_start[R], token, ids))

    def for_engine(self, output: StepOutput) -> EngineRows:
        """Select the outcome of each request of the batch.

        Args:
            output: The outcome by slot.
        """
        n = len(self.requests.slots)
        selected = self._select(output.tokens, output.num_emitted, output.num_finished)
        return rows_of(selected, slice(n))

    def _by_request(self, tokens: Tensor, num_emitted: Tensor, num_finished: Tensor) -> EngineRows:
        numbers, R = self._numbers, self.slots.num_slots
        slot = numbers.slot[:R].long()
        return EngineRows(
            tokens[slot].to(torch.int32),
            num_emitted[slot],
            numbers.num_canvas[:R] - num_finished[slot],
        )
