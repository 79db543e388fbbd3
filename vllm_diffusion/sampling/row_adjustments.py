"""What requests ask of the logits themselves, laid out for the rows of a batch.

``allowed_token_ids``, ``logit_bias``, ``min_tokens``, the penalties and the constraints of the
scheduler change every distribution of a row: the candidate's, the argmax, the entropy and the
self-conditioning signal. Their meanings and their order are those of vLLM's own processors, which
work on whole rows; here they are tables that are read wherever a logit is
(:class:`attention_kernels.vocab_statistics.LogitAdjustments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from attention_kernels.vocab_statistics import LogitAdjustments
from vllm_diffusion.sampling.constraint_tensors import ConstraintTensors

_FORBIDDEN = float("-inf")


class _OffsetTable:
    """Rows of the vocabulary's width that requests own; as many as were ever needed at once."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.rows = torch.empty(0, vocab_size, device=device)
        self._free: list[int] = []

    def take(self, values: Tensor) -> int:
        """Store [vocab_size] float32 and return its row."""
        if not self._free:
            n = len(self.rows)
            self._free = list(range(n, max(2 * n, 1)))
            self.rows = torch.cat([self.rows, self.rows.new_empty(len(self._free), len(values))])
        row = self._free.pop(0)
        self.rows[row].copy_(values)
        return row

    def give_back(self, row: int) -> None:
        """A pass on its way has been launched: nothing is written before it has read."""
        self._free.append(row)


@dataclass(frozen=True)
class _Offsets:
    """Of one request: which rows of the table are added to its logits; -1 for none.

    Attributes:
        always: From ``min_length`` on.
        early: Before it.
        readable: What a read-only canvas is asked about, as part of what it reports.
        min_length: Tokens of prompt and answer.
    """

    always: int
    early: int
    readable: int
    min_length: int

    def rows(self) -> set[int]:
        """All of them."""
        return {self.always, self.early, self.readable} - {-1}


class RowAdjustments:
    """Of all slots; :meth:`bind` gives those of a batch."""

    def __init__(self, stock_sampler: Any, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # vLLM's runner counts committed tokens in it.
        self._penalties = stock_sampler.penalties_state
        self._prompt_len = stock_sampler.req_states.prompt_len
        self._table = _OffsetTable(vocab_size, device)
        # By slot.
        self._offsets: dict[int, _Offsets] = {}
        self._penalised: set[int] = set()

    def add_request(
        self, slot: int, sampling_params: Any, readable: tuple[int, ...] | None = None
    ) -> None:
        """Take what a new owner of ``slot`` asks for.

        Args:
            slot: Its row in every state.
            sampling_params: vLLM's.
            readable: The only ids that a read-only canvas is asked about; ``None`` for all.
        """
        self.remove_request(slot)
        if self._penalties.add_request(slot, sampling_params):
            self._penalised.add(slot)
        bias, allowed = sampling_params.logit_bias, sampling_params.allowed_token_ids
        ends: list[int] = []
        if sampling_params.min_tokens > 0:
            # A request may name ids that the model does not have.
            ends = [i for i in sampling_params.all_stop_token_ids if 0 <= i < self._vocab_size]
        if readable is None and not (bias or ends or allowed):
            return
        offsets = torch.zeros(self._vocab_size, device=self._device)
        readable_row = always = -1
        if readable is not None:
            offsets += self._only(readable)
            readable_row = always = self._table.take(offsets)
        if allowed or bias:
            if allowed:
                offsets += self._only(allowed)
            if bias:
                values = np.array(list(bias.values()), dtype=np.float32)
                offsets[self._ids(bias)] += async_tensor_h2d(values, device=self._device)
            always = self._table.take(offsets)
        early = always
        if ends:
            early = self._table.take(offsets.index_fill(0, self._ids(ends), _FORBIDDEN))
        min_length = int(self._prompt_len.np[slot]) + sampling_params.min_tokens
        self._offsets[slot] = _Offsets(always, early, readable_row, min_length)

    def remove_request(self, slot: int) -> None:
        """Forget ``slot``'s settings."""
        if offsets := self._offsets.pop(slot, None):
            for row in offsets.rows():
                self._table.give_back(row)
        self._penalised.discard(slot)

    def apply_staged_writes(self) -> None:
        self._penalties.apply_staged_writes()

    def bind(
        self,
        input_batch: InputBatch,
        constraints: ConstraintTensors | None,
        drawn_at: Callable[[], Tensor] | None = None,
    ) -> LogitAdjustments | None:
        """Those of a batch's canvas rows; ``None`` if nobody asks for any.

        Args:
            input_batch: The batch.
            constraints: Of the scheduler.
            drawn_at: Gives [num_rows], int64: the position in its sequence of the token that each row
                draws; ``None`` if that is the row's own.
        """
        if not (self._penalised or self._offsets or constraints is not None):
            return None
        layout = _Layout(input_batch)
        has_penalties = not self._penalised.isdisjoint(layout.slots)
        has_offsets = not self._offsets.keys().isdisjoint(layout.slots)
        if not (has_penalties or has_offsets or constraints is not None):
            return None
        late, early, min_length, penalty_idx = (layout.column(value) for value in (-1, -1, 0, -1))
        for slot, rows in layout.slots.items():
            if slot in self._penalised:
                penalty_idx[rows] = slot
            if own := self._offsets.get(slot):
                late[rows], early[rows] = own.always, own.early
                min_length[rows] = own.min_length
        columns = layout.to_device(late, early, min_length, penalty_idx)
        adjustments = self.none(layout.num_rows)
        if has_offsets:
            if drawn_at is None:
                positions = input_batch.positions[input_batch.logits_indices]
            else:
                positions = drawn_at()
            adjustments = adjustments._replace(
                offset_idx=torch.where(positions < columns[2], columns[1], columns[0]),
                offsets=self._table.rows,
            )
        if has_penalties:
            state = self._penalties
            adjustments = adjustments._replace(
                penalty_idx=columns[3],
                # vLLM keeps these where the host writes them: to be read once and not by each block.
                repetition=state.repetition_penalty.gpu.clone(),
                frequency=state.frequency_penalty.gpu.clone(),
                presence=state.presence_penalty.gpu.clone(),
                prompt_mask=state.prompt_bin_mask,
                output_counts=state.output_bin_counts,
            )
        if constraints is not None:
            adjustments = adjustments._replace(pin=constraints.pin)
            if len(constraints.masks) > 0:
                adjustments = adjustments._replace(
                    mask_idx=constraints.mask_idx, masks=constraints.masks
                )
        return adjustments

    def bind_readable(self, input_batch: InputBatch) -> LogitAdjustments | None:
        """What read-only canvases are asked about, which is part of what they report."""
        layout = _Layout(input_batch)
        index = layout.column(-1)
        for slot, rows in layout.slots.items():
            if own := self._offsets.get(slot):
                index[rows] = own.readable
        if (index < 0).all():
            return None
        (offset_idx,) = layout.to_device(index)
        return self.none(layout.num_rows)._replace(offset_idx=offset_idx, offsets=self._table.rows)

    def none(self, num_rows: int) -> LogitAdjustments:
        """Rows that ask for nothing."""
        nobody = torch.full((num_rows,), -1, dtype=torch.int32, device=self._device)
        state = self._penalties
        return LogitAdjustments(
            offset_idx=nobody,
            offsets=self._table.rows[:0],
            penalty_idx=nobody,
            repetition=state.repetition_penalty.gpu,
            frequency=state.frequency_penalty.gpu,
            presence=state.presence_penalty.gpu,
            prompt_mask=state.prompt_bin_mask[:0],
            output_counts=state.output_bin_counts[:0],
            mask_idx=nobody,
            masks=state.prompt_bin_mask[:0],
            pin=nobody,
        )

    def _only(self, ids: Iterable[int]) -> Tensor:
        """[vocab_size], float32: zero for these ids, and nothing else is possible."""
        nothing = torch.full((self._vocab_size,), _FORBIDDEN, device=self._device)
        return nothing.index_fill_(0, self._ids(ids), 0.0)

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return async_tensor_h2d(np.array(list(ids), dtype=np.int64), device=self._device)


class _Layout:
    """Where the canvas rows of a batch are.

    Attributes:
        slots: Slots that have any, with their rows. A request at its prompt has none.
        num_rows: Of all.
    """

    def __init__(self, input_batch: InputBatch) -> None:
        starts = input_batch.cu_num_logits_np.tolist()
        slots = input_batch.idx_mapping_np.tolist()
        self.slots = {
            slot: slice(first, end)
            for slot, first, end in zip(slots, starts, starts[1:], strict=False)
            if first < end
        }
        self.num_rows = starts[len(slots)]
        self._device = input_batch.logits_indices.device

    def column(self, value: int) -> np.ndarray:
        """[num_rows], int32; longer in memory, so that each of several starts at a round address."""
        return np.full(-(-self.num_rows // 4) * 4, value, dtype=np.int32)

    def to_device(self, *columns: np.ndarray) -> list[Tensor]:
        """All in one copy."""
        on_device = async_tensor_h2d(np.stack(columns), device=self._device)
        return [column[: self.num_rows] for column in on_device]
