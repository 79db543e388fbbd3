"""What requests ask of the logits themselves, laid out for the rows of a batch.

``allowed_token_ids``, ``logit_bias``, ``min_tokens``, the penalties and the constraints of the
scheduler change every distribution of a row: the candidate's, the argmax, the entropy and the
self-conditioning signal. Their meanings and their order are those of vLLM's own processors, which
work on whole rows; here they are tables that are read wherever a logit is
(:class:`attention_kernels.vocab_statistics.LogitAdjustments`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from attention_kernels.vocab_statistics import LogitAdjustments
from vllm_diffusion.sampling.constraint_tensors import ConstraintTensors

_FORBIDDEN = float("-inf")


@dataclass(frozen=True)
class _Offsets:
    """Of one request: what is added to the logits of a row.

    Attributes:
        always: [vocab_size], float32.
        early: The same for rows before ``min_length``; ``None`` without a minimum.
        min_length: Tokens of prompt and answer.
    """

    always: Tensor
    early: Tensor | None
    min_length: int


class RowAdjustments:
    """Of all slots; :meth:`bind` gives those of a batch."""

    def __init__(self, stock_sampler: Any, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        # vLLM's runner counts committed tokens in it.
        self._penalties = stock_sampler.penalties_state
        self._prompt_len = stock_sampler.req_states.prompt_len
        # By slot: what a read-only canvas is asked about, and everything that is added.
        self._readable: dict[int, Tensor] = {}
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
        if readable is not None:
            self._readable[slot] = self._only(readable)
        bias, allowed = sampling_params.logit_bias, sampling_params.allowed_token_ids
        ends: list[int] = []
        if sampling_params.min_tokens > 0:
            # A request may name ids that the model does not have.
            ends = [i for i in sampling_params.all_stop_token_ids if 0 <= i < self._vocab_size]
        if readable is None and not (bias or ends or allowed):
            return
        always = torch.zeros(self._vocab_size, device=self._device)
        if readable is not None:
            always += self._readable[slot]
        if allowed:
            always += self._only(allowed)
        if bias:
            values = np.array(list(bias.values()), dtype=np.float32)
            always[self._ids(bias)] += async_tensor_h2d(values, device=self._device)
        early = None
        if ends:
            early = always.index_fill(0, self._ids(ends), _FORBIDDEN)
        min_length = int(self._prompt_len.np[slot]) + sampling_params.min_tokens
        self._offsets[slot] = _Offsets(always, early, min_length)

    def remove_request(self, slot: int) -> None:
        """Forget ``slot``'s settings."""
        self._readable.pop(slot, None)
        self._offsets.pop(slot, None)
        self._penalised.discard(slot)

    def apply_staged_writes(self) -> None:
        self._penalties.apply_staged_writes()

    def bind(
        self, input_batch: InputBatch, constraints: ConstraintTensors | None
    ) -> LogitAdjustments | None:
        """Those of a batch's canvas rows; ``None`` if nobody asks for any.

        Args:
            input_batch: The batch.
            constraints: Of the scheduler.
        """
        slots = input_batch.idx_mapping_np.tolist()
        has_penalties = not self._penalised.isdisjoint(slots)
        if not (has_penalties or constraints or not self._offsets.keys().isdisjoint(slots)):
            return None
        layout = _Layout(input_batch)
        tables: list[Tensor] = []
        late, early, min_length, penalty_idx = (layout.column(value) for value in (-1, -1, 0, -1))
        for slot, rows in layout:
            if slot in self._penalised:
                penalty_idx[rows] = slot
            if slot in self._offsets:
                own = self._offsets[slot]
                late[rows] = early[rows] = len(tables)
                tables.append(own.always)
                if own.early is not None:
                    early[rows] = len(tables)
                    min_length[rows] = own.min_length
                    tables.append(own.early)
        columns = layout.to_device(late, early, min_length, penalty_idx)
        positions = input_batch.positions[input_batch.logits_indices]
        adjustments = self.none(layout.num_rows)._replace(
            offset_idx=torch.where(positions < columns[2], columns[1], columns[0])
        )
        if tables:
            adjustments = adjustments._replace(offsets=torch.stack(tables))
        if has_penalties:
            adjustments = adjustments._replace(
                penalty_idx=columns[3],
                prompt_mask=self._penalties.prompt_bin_mask,
                output_counts=self._penalties.output_bin_counts,
            )
        if constraints is not None:
            adjustments = adjustments._replace(
                mask_idx=constraints.mask_idx, masks=constraints.masks, pin=constraints.pin
            )
        return adjustments

    def bind_readable(self, input_batch: InputBatch) -> LogitAdjustments | None:
        """What read-only canvases are asked about, which is part of what they report."""
        if self._readable.keys().isdisjoint(input_batch.idx_mapping_np.tolist()):
            return None
        layout = _Layout(input_batch)
        tables: list[Tensor] = []
        index = layout.column(-1)
        for slot, rows in layout:
            if slot in self._readable:
                index[rows] = len(tables)
                tables.append(self._readable[slot])
        (offset_idx,) = layout.to_device(index)
        return self.none(layout.num_rows)._replace(
            offset_idx=offset_idx, offsets=torch.stack(tables)
        )

    def none(self, num_rows: int) -> LogitAdjustments:
        """Rows that ask for nothing."""
        nobody = torch.full((num_rows,), -1, dtype=torch.int32, device=self._device)
        state = self._penalties
        return LogitAdjustments(
            offset_idx=nobody,
            offsets=torch.empty(0, self._vocab_size, device=self._device),
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
    """Where the canvas rows of a batch's requests are."""

    def __init__(self, input_batch: InputBatch) -> None:
        self._slots = input_batch.idx_mapping_np.tolist()
        self._starts = input_batch.cu_num_logits_np.tolist()
        self._device = input_batch.logits_indices.device
        self.num_rows = self._starts[len(self._slots)]

    def __iter__(self) -> Iterator[tuple[int, slice]]:
        """Slots and their rows."""
        return zip(self._slots, (slice(a, b) for a, b in pairwise(self._starts)), strict=False)

    def column(self, value: int) -> np.ndarray:
        """[num_rows], int32."""
        return np.full(self.num_rows, value, dtype=np.int32)

    def to_device(self, *columns: np.ndarray) -> tuple[Tensor, ...]:
        """All in one copy."""
        on_device: Tensor = async_tensor_h2d(np.stack(columns), device=self._device)
        return on_device.unbind(0)
