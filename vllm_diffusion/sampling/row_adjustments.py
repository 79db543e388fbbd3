"""What a request asks of the logits themselves, applied to a tile of the vocabulary at a time.

``allowed_token_ids``, ``logit_bias``, ``min_tokens``, the penalties and the constraints of the
scheduler change every distribution of a row: the candidate's, the argmax, the entropy and the
self-conditioning signal. Their meanings and their order are those of vLLM's own processors, which
work on whole rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_diffusion.sampling.constraint_tensors import ConstraintTensors
from vllm_diffusion.sampling.token_ids import TokenIds

_IMPOSSIBLE = float("-inf")
# Logit of what a grammar demands and another setting forbids: nothing beside any other token, and
# yet possible where nothing else is.
_LAST_RESORT = -1e4


@dataclass(frozen=True)
class _Request:
    """What one request asks for.

    Attributes:
        allowed: The only possible ids.
        biased: Ids with a bias.
        bias: [len(biased)], float32.
        ends: Ids that are impossible before ``min_length``.
        min_length: Tokens of prompt and answer.
        has_penalties: Whether vLLM counts its tokens.
    """

    allowed: TokenIds | None
    biased: TokenIds | None
    bias: Tensor | None
    ends: TokenIds | None
    min_length: int
    has_penalties: bool


class RowAdjustments:
    """Of all slots; :meth:`bind` gives those of a batch."""

    def __init__(self, stock_sampler: Any, slots_device: torch.device) -> None:
        self._device = slots_device
        # vLLM's runner counts committed tokens in it.
        self.penalties = stock_sampler.penalties_state
        self._prompt_len = stock_sampler.req_states.prompt_len
        self._requests: dict[int, _Request] = {}

    def add_request(self, slot: int, sampling_params: Any) -> None:
        self._requests.pop(slot, None)
        has_penalties = self.penalties.add_request(slot, sampling_params)
        bias = sampling_params.logit_bias
        ends = sampling_params.all_stop_token_ids if sampling_params.min_tokens > 0 else ()
        allowed = sampling_params.allowed_token_ids
        if not (has_penalties or bias or ends or allowed):
            return
        biased = TokenIds.of(bias, self._device) if bias else None
        values = None
        if bias and biased is not None:
            ordered = np.array([bias[i] for i in biased.on_host.tolist()], dtype=np.float32)
            values = async_tensor_h2d(ordered, device=self._device)
        self._requests[slot] = _Request(
            allowed=TokenIds.of(allowed, self._device) if allowed else None,
            biased=biased,
            bias=values,
            ends=TokenIds.of(ends, self._device) if ends else None,
            min_length=int(self._prompt_len.np[slot]) + sampling_params.min_tokens,
            has_penalties=has_penalties,
        )

    def remove_request(self, slot: int) -> None:
        """Forget ``slot``'s settings."""
        self._requests.pop(slot, None)

    def apply_staged_writes(self) -> None:
        self.penalties.apply_staged_writes()

    def bind(
        self,
        input_batch: InputBatch,
        readable: dict[int, TokenIds],
        constraints: ConstraintTensors | None,
    ) -> BatchAdjustments | None:
        """Those of a batch's canvas rows; ``None`` if nobody asks for any.

        Args:
            input_batch: The batch.
            readable: By slot, the only ids that a read-only canvas is asked about.
            constraints: Of the scheduler.
        """
        starts = input_batch.cu_num_logits_np
        restricted, adjusted = [], []
        for i, slot in enumerate(input_batch.idx_mapping_np.tolist()):
            rows = slice(int(starts[i]), int(starts[i + 1]))
            if slot in readable:
                restricted.append((rows, readable[slot]))
            if slot in self._requests:
                adjusted.append((rows, slot, self._requests[slot]))
        if not (restricted or adjusted or constraints is not None):
            return None
        return BatchAdjustments(
            self.penalties,
            input_batch.positions[input_batch.logits_indices],
            restricted,
            adjusted,
            constraints,
        )


@dataclass(frozen=True)
class BatchAdjustments:
    """Of one batch. Every method takes float32 logits and changes them in place.

    Attributes:
        penalties: vLLM's state.
        positions: [num_rows], the place of each row in its sequence.
        restricted: Rows of read-only canvases with the ids they are asked about.
        adjusted: Rows of other requests that ask for something, their slots, and for what.
        constraints: Of the scheduler.
    """

    penalties: Any
    positions: Tensor
    restricted: list[tuple[slice, TokenIds]]
    adjusted: list[tuple[slice, int, _Request]]
    constraints: ConstraintTensors | None

    def restrict(self, logits: Tensor, first_id: int, chunk: slice) -> None:
        """What a read-only canvas is asked about; part of the distribution it reports.

        Args:
            logits: [num_rows, num_ids], float32.
            first_id: The tile's first id.
            chunk: Which of the batch's canvas rows these are.
        """
        for rows, allowed in self.restricted:
            _allow_only(logits[_inside(rows, chunk)], first_id, allowed)

    def apply(self, logits: Tensor, first_id: int, chunk: slice) -> None:
        """Everything else. Arguments as for :meth:`restrict`."""
        for rows, slot, request in self.adjusted:
            inside = _inside(rows, chunk)
            part = logits[inside]
            if part.shape[0] == 0:
                continue
            if request.allowed is not None:
                _allow_only(part, first_id, request.allowed)
            if request.biased is not None and request.bias is not None:
                found = request.biased.within(first_id, part.shape[1])
                if found.start < found.stop:
                    part[:, request.biased.on_device[found] - first_id] += request.bias[found]
            if request.ends is not None:
                found = request.ends.within(first_id, part.shape[1])
                if found.start < found.stop:
                    ids = request.ends.on_device[found] - first_id
                    early = self.positions[chunk][inside] < request.min_length
                    part[:, ids] = torch.where(early[:, None], _IMPOSSIBLE, part[:, ids])
            if request.has_penalties:
                self._penalise(part, first_id, slot)
        if self.constraints is not None:
            self.constraints.apply(logits, first_id, chunk, _LAST_RESORT)

    def _penalise(self, logits: Tensor, first_id: int, slot: int) -> None:
        """Repetition, frequency and presence over committed tokens; a canvas is not text yet."""
        state = self.penalties
        ids = torch.arange(first_id, first_id + logits.shape[1], device=logits.device)
        counts = state.output_bin_counts[slot, first_id : first_id + logits.shape[1]]
        in_answer = counts > 0
        repetition = float(state.repetition_penalty.np[slot])
        if repetition != 1.0:
            in_prompt = (state.prompt_bin_mask[slot, ids >> 5] >> (ids & 31)) & 1 == 1
            seen = in_prompt | in_answer
            scaled = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits.copy_(torch.where(seen, scaled, logits))
        logits -= float(state.frequency_penalty.np[slot]) * counts
        logits -= float(state.presence_penalty.np[slot]) * in_answer


def _inside(rows: slice, chunk: slice) -> slice:
    """``rows`` as seen from ``chunk``; empty where they do not meet."""
    low = max(rows.start, chunk.start) - chunk.start
    return slice(low, max(low, min(rows.stop, chunk.stop) - chunk.start))


def _allow_only(logits: Tensor, first_id: int, allowed: TokenIds) -> None:
    found = allowed.within(first_id, logits.shape[1])
    kept = allowed.on_device[found] - first_id
    only = torch.full_like(logits, _IMPOSSIBLE)
    only[:, kept] = logits[:, kept]
    logits.copy_(only)
