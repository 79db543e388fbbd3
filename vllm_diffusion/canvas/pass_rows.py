"""Where the rows of a pass are, at addresses that never change.

The host knows it, but for what only the device does: which canvases are being committed. One copy takes
the host's part to the device, and one function makes of it what attention, the embedding and the sampler
read, so that graphs of them need no inputs of their own. R is the number of slots, C the canvas length,
N the most rows of a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_diffusion.canvas.slots import CanvasSlots, Phase
from vllm_diffusion.canvas.step import SlotPass, StepOutput
from vllm_diffusion.startup.compilation import compiled


class _Numbers(NamedTuple):
    """What the host knows, as it makes it and on the device; of requests in their order, or of slots.

    Attributes:
        slot: [R + 1], int32 as what follows, of each request.
        query_start: [R + 1], the first row of each request in the pass, and behind the last one the
            number of rows.
        row_start: [R + 1], the same among the rows that are sampled.
        num_canvas: [R + 1], canvas rows of each request.
        is_known: [R + 1], whether its other rows are tokens of a finished canvas.
        num_rows: [R + 1], canvas rows of each slot.
        num_valid: [R + 1], of slots, as in :class:`SlotPass`; these three say that there is no
            constraint.
        free_from: [R + 1].
        free_to: [R + 1].
        seeding: [R + 1], of which the first R bytes are bool: slots of which one row is sampled that
            gives their canvas's first token.
    """

    slot: Any
    query_start: Any
    row_start: Any
    num_canvas: Any
    is_known: Any
    num_rows: Any
    num_valid: Any
    free_from: Any
    free_to: Any
    seeding: Any


class EngineRows(NamedTuple):
    """What the engine is told of each request; new tensors, since it copies them in its own time.

    Attributes:
        tokens: [num_reqs, C], int32.
        num_sampled: [num_reqs], int32: how many of them are emitted.
        num_rejected: [num_reqs], int32: rows that do not advance the sequence: those of a step that
            emits its canvas to be encoded do not, those of a pass whose keys and values are final do.
    """

    tokens: Tensor
    num_sampled: Tensor
    num_rejected: Tensor


class PassRows:
    """The rows of the pass that :meth:`lay_out` was last called for.

    Sampled are canvas rows and, for a model whose canvases begin with a token that known ones give
    (``CanvasLayout.seeding``), the last row of each request whose known tokens end in the pass: to the
    sampler that is a canvas of one row.

    Attributes:
        slots: The canvases.
        causal_rows: [R], int32, leading causal rows of each request; padding requests have none. Rows
            of a canvas that is denoised attend in both directions; those of prompts and of finished
            canvases are causal, apart from their spans.
        causal_flags: [R], int32, the same as a flag, for back ends that know only those: for them the
            scheduler never has a request do both in one pass.
        index: [N], int64: where in the pass the rows are that are sampled; 0 behind the last.
        hidden_index: [N], int64: where the hidden states are that say what stands there.
        slot: [N], int64: of each of them.
        position: [N], int64: in its canvas.
        offset: [N], int64: from the first row of its request to where its hidden state is.
        of_slots: What the decision is told, as if there were no constraints; seeds are the sampler's to
            fill in.
        of_constraints: [3, R], int32: what it is told of constraints, the last three of the same.
        starts: [num_reqs + 1], on the host: where each request's rows are among those sampled.
        slots_np: [num_reqs], on the host.
        seeding: [num_reqs], bool, on the host: requests with one row that is no canvas's; ``None`` if
            there are none.
    """

    def __init__(self, slots: CanvasSlots, max_rows: int, compile_backend: str | None) -> None:
        """Allocate for the largest pass.

        Args:
            slots: The canvases.
            max_rows: Rows of the largest pass.
            compile_backend: Backend of ``torch.compile``, which makes one or two launches of each
                function; ``None`` runs its operations one by one.
        """
        self.slots, self._layout = slots, slots.spec.layout
        R, N, device = slots.num_slots, max_rows, slots.device
        # Compiled for the largest pass, so that it is compiled once; else as long as the pass is.
        self._most = None if compile_backend is None else N
        self._held = torch.zeros(len(_Numbers._fields), R + 1, dtype=torch.int32, device=device)
        self._numbers = _Numbers(*self._held)

        def integers(size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.causal_rows, self.causal_flags = (integers(R, torch.int32) for _ in range(2))
        self.index, self.slot, self.position, self.offset = (integers(N) for _ in range(4))
        self.hidden_index = self._layout.hidden_index(self.index)
        numbers = self._numbers
        # What needs no arithmetic is read where it was copied to.
        self.of_slots = SlotPass(
            num_rows=numbers.num_rows[:R],
            seed=integers(R),
            seeding=numbers.seeding.view(torch.bool)[:R],
            num_valid=numbers.num_valid[:R],
            free_from=numbers.free_from[:R],
            free_to=numbers.free_to[:R],
        )
        first = _Numbers._fields.index("num_valid")
        self.of_constraints = self._held[first : first + 3, :R]
        self.starts = np.zeros(1, dtype=np.int64)
        self.slots_np = np.zeros(0, dtype=np.int64)
        self.seeding: np.ndarray | None = None
        self._spread = compiled(self._spread_over_rows, compile_backend)
        self._fill = compiled(self._fill_ids, compile_backend)
        self._select: Callable[[Tensor, Tensor, Tensor], EngineRows] = compiled(
            self._by_request, compile_backend
        )

    @property
    def num_rows(self) -> int:
        """Rows that are sampled."""
        return int(self.starts[-1])

    def lay_out(self, input_batch: InputBatch) -> None:
        """Take the batch of a pass, before anything of it is launched."""
        n, num_slots = input_batch.num_reqs, self.slots.num_slots
        self.slots_np = input_batch.idx_mapping_np[:n].astype(np.int64)
        num_canvas = np.diff(input_batch.cu_num_logits_np[: n + 1]).astype(np.int64)
        is_over = (
            input_batch.num_computed_prefill_tokens_np[:n] + input_batch.num_scheduled_tokens[:n]
            >= input_batch.prefill_len_np[:n]
        ) & (num_canvas == 0)
        # A finished canvas that the token budget cuts counts with each of its parts: the last one's
        # row is read before a canvas is.
        self.seeding = self._layout.seeding(is_over)
        num_sampled = num_canvas if self.seeding is None else num_canvas + self.seeding
        self.starts = np.concatenate([[0], np.cumsum(num_sampled)])

        held = np.zeros((len(_Numbers._fields), num_slots + 1), dtype=np.int32)
        numbers = _Numbers(*held)
        numbers.slot[:n] = self.slots_np
        numbers.query_start[: n + 1] = input_batch.query_start_loc_np[: n + 1]
        numbers.query_start[n + 1 :] = input_batch.query_start_loc_np[n]
        numbers.row_start[: n + 1] = self.starts
        numbers.row_start[n + 1 :] = self.starts[n]
        numbers.num_canvas[:n] = num_canvas
        numbers.is_known[:n] = ~input_batch.is_prefilling_np[:n]
        numbers.num_rows[self.slots_np] = num_canvas
        if self.seeding is not None:
            numbers.seeding.view(np.bool_)[self.slots_np] = self.seeding
        numbers.num_valid.fill(-1)
        async_tensor_h2d(held, out=self._held)
        rows = slice(self._most or self.num_rows)
        self._spread(
            self.index[rows],
            self.hidden_index[rows],
            self.slot[rows],
            self.position[rows],
            self.offset[rows],
        )

    def clear(self) -> None:
        """As for a pass without requests: what is run then changes nobody's canvas."""
        self._held.zero_()
        self._numbers.num_valid.fill_(-1)
        self.starts = np.zeros(1, dtype=np.int64)
        self.seeding = None
        for tensor in (self.index, self.hidden_index, self.slot, self.position, self.offset):
            tensor.zero_()

    def _spread_over_rows(
        self,
        index: Tensor,
        hidden_index: Tensor,
        slot: Tensor,
        position: Tensor,
        offset: Tensor,
    ) -> None:
        """What the host knows, for requests and for rows; every argument is filled."""
        numbers, slots, layout = self._numbers, self.slots, self._layout
        R = slots.num_slots
        query_lens = numbers.query_start[1:] - numbers.query_start[:-1]
        num_bidirectional = layout.num_bidirectional(
            numbers.num_canvas[:R],
            lambda: slots.phase[numbers.slot[:R].long()] == int(Phase.COMMITTING),
        )
        self.causal_rows.copy_(query_lens - num_bidirectional)
        self.causal_flags.copy_((num_bidirectional == 0) & (query_lens > 0))

        row = torch.arange(len(index), dtype=torch.int32, device=index.device)
        is_row = row < numbers.row_start[R]
        # Its request is the first one that ends behind it.
        request = torch.searchsorted(numbers.row_start[1:], row, right=True).clamp(max=R - 1)
        within = row - numbers.row_start[request]
        # Rows that are sampled are the last ones of their request.
        start, end = numbers.query_start[request], numbers.query_start[request + 1]
        at = end - numbers.row_start[request + 1] + row
        index.copy_(torch.where(is_row, at, 0))
        slot.copy_(torch.where(is_row, numbers.slot[request], 0))
        position.copy_(torch.where(is_row, within, 0))
        hidden_at = layout.hidden_at(at, within, lambda: self.of_slots.seeding[slot])
        if hidden_at is not at:
            hidden_index.copy_(torch.where(is_row, hidden_at, 0))
        offset.copy_(torch.where(is_row, hidden_at - start, 0))

    def fill_ids(
        self, input_batch: InputBatch, all_token_ids: Tensor, num_computed: Tensor
    ) -> None:
        """Put canvases, and finished canvases before them, into a batch's token ids.

        The runner leaves nothing of meaning in either.

        Args:
            input_batch: The one that was laid out.
            all_token_ids: [R, max_model_len], int32: known tokens of each slot.
            num_computed: [R], int32: how many of them each slot had before the pass.
        """
        ids = input_batch.input_ids
        count = self._most or input_batch.num_tokens
        # The runner's own tensor, of which the batch has the beginning.
        whole = ids.as_strided((count,), (1,), ids.storage_offset())
        self._fill(whole, all_token_ids, num_computed)

    def _fill_ids(self, ids: Tensor, all_token_ids: Tensor, num_computed: Tensor) -> None:
        numbers, canvas = self._numbers, self.slots.canvas
        row = torch.arange(len(ids), dtype=torch.int32, device=ids.device)
        R, C = canvas.shape
        request = torch.searchsorted(numbers.query_start[1:], row, right=True).clamp(max=R - 1)
        slot = numbers.slot[request].long()
        within = row - numbers.query_start[request]
        num_others = numbers.query_start[request + 1] - numbers.query_start[request]
        position = within - (num_others - numbers.num_canvas[request])
        known_at = (num_computed[slot] + within).clamp(0, all_token_ids.shape[1] - 1)
        known = all_token_ids[slot, known_at.long()].to(ids.dtype)
        drawn = canvas[slot, position.clamp(0, C - 1).long()].to(ids.dtype)
        token = torch.where(numbers.is_known[request] > 0, known, ids)
        token = torch.where(position >= 0, drawn, token)
        ids.copy_(torch.where(row < numbers.query_start[R], token, ids))

    def for_engine(self, output: StepOutput) -> EngineRows:
        """What became of each request of the batch."""
        n = len(self.slots_np)
        selected = self._select(output.tokens, output.num_emitted, output.num_finished)
        return EngineRows(*(values[:n] for values in selected))

    def _by_request(self, tokens: Tensor, num_emitted: Tensor, num_finished: Tensor) -> EngineRows:
        numbers, R = self._numbers, self.slots.num_slots
        slot = numbers.slot[:R].long()
        return EngineRows(
            tokens[slot].to(torch.int32),
            num_emitted[slot],
            numbers.num_canvas[:R] - num_finished[slot],
        )
