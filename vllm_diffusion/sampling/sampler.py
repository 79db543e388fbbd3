"""The sampler that the model runner calls after each forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from vllm_diffusion.constraints import CanvasConstraints
from vllm_diffusion.decoding.policy import Policy
from vllm_diffusion.model_state.request_slots import CanvasSlots
from vllm_diffusion.sampling.canvas_step import (
    Noise,
    SlotStatistics,
    StepOutput,
    make_canvas_step,
    schedule_temperature,
)
from vllm_diffusion.sampling.constraint_tensors import ConstraintTensors
from vllm_diffusion.sampling.logits_adjustments import LogitsAdjustments
from vllm_diffusion.sampling.row_statistics import CandidateFilters, row_statistics

# Rows are projected to the vocabulary in chunks, so that their float32 logits and what is made of
# them stay within this many bytes.
LOGITS_BYTES = 512 * 1024**2
# float32 tensors of the size of the logits that are alive at once: logits, scaled, log-probs,
# probs, noise words (int64) and noise.
_LIVE_LOGITS = 7


class DiffusionSampler:
    """One denoising step: rows -> logits -> policy -> committed tokens -> engine output.

    Nothing here reads a value from the device.
    """

    def __init__(
        self,
        stock_sampler: Any,
        slots: CanvasSlots,
        policy: Policy,
        noise: Noise,
        *,
        project: Callable[[Tensor], Tensor],
        store_soft_embeds: Callable[[Tensor, Tensor, Tensor], None] | None,
        vocab_size: int,
        converge_at_end: bool,
        emits_when_done: bool,
        compile_backend: str | None,
    ) -> None:
        """Bind the sampler to a model.

        Args:
            stock_sampler: vLLM's sampler, whose per-request states are reused.
            slots: The canvases.
            policy: The rule that decides what to keep.
            noise: What fills the rest.
            project: [num_rows, ...] as ``compute_logits`` returned them -> float32 logits
                [num_rows, vocab_size].
            store_soft_embeds: (probabilities [num_rows, vocab_size] float32, slot [num_rows],
                position [num_rows]) for self-conditioning; ``None`` for a model without it.
            vocab_size: Number of token ids.
            converge_at_end: Judge a canvas by its positions up to its first end token.
            emits_when_done: Whether a canvas is emitted when it converges, or by the pass after it.
            compile_backend: Backend of ``torch.compile`` for the step; ``None`` runs eagerly.
        """
        self.sampling_states = stock_sampler.sampling_states
        self.logprob_token_ids_state = stock_sampler.logprob_token_ids_state
        self.req_states = stock_sampler.req_states
        # The runner counts committed tokens in it.
        self.penalties_state = stock_sampler.penalties_state
        self.adjustments = LogitsAdjustments(stock_sampler, slots.num_slots)
        self.compute_nans = False
        self.logits_mode = stock_sampler.logprobs_mode in ("raw_logits", "processed_logits")
        self.reports_raw = stock_sampler.logprobs_mode in ("raw_logits", "raw_logprobs")
        self.slots = slots
        self.project = project
        self.store_soft_embeds = store_soft_embeds
        self.vocab_size = vocab_size
        self.canvas_step = make_canvas_step(
            slots,
            policy,
            noise,
            converge_at_end=converge_at_end,
            emits_when_done=emits_when_done,
            compile_backend=compile_backend,
        )
        self.emits_when_done = emits_when_done
        self.max_chunk_rows = max(
            slots.canvas_length, LOGITS_BYTES // (4 * _LIVE_LOGITS * vocab_size)
        )

        R, C, device = slots.num_slots, slots.canvas_length, slots.device
        self._statistics = SlotStatistics(
            argmax=torch.zeros(R, C, dtype=torch.int64, device=device),
            candidate=torch.zeros(R, C, dtype=torch.int64, device=device),
            entropy=torch.zeros(R, C, dtype=torch.float32, device=device),
            confidence=torch.zeros(R, C, dtype=torch.float32, device=device),
        )
        self._logprobs = LogprobsStash(R, C, device)
        # Set before a call by whoever has the scheduler's message; used up by the call.
        self.constraints: CanvasConstraints | None = None
        self._unconstrained = (
            torch.full((R,), -1, dtype=torch.int32, device=device),
            torch.zeros(R, dtype=torch.int32, device=device),
            torch.zeros(R, dtype=torch.int32, device=device),
        )

    def add_request(self, slot: int, sampling_params: Any) -> None:
        self.sampling_states.add_request(slot, sampling_params)
        self.adjustments.add_request(slot, sampling_params)
        self.logprob_token_ids_state.add_request(slot, sampling_params)

    def apply_staged_writes(self) -> None:
        self.sampling_states.apply_staged_writes()
        self.adjustments.apply_staged_writes()
        self.logprob_token_ids_state.apply_staged_writes()

    def __call__(
        self, rows: Tensor, input_batch: InputBatch, draft_logits: Tensor | None = None
    ) -> SamplerOutput:
        """Sample one pass of the whole batch.

        Args:
            rows: [num_rows, ...], what ``compute_logits`` returned for the canvas rows.
            input_batch: The batch that ran.
            draft_logits: Unused; part of the runner's call.
        """
        num_reqs = input_batch.num_reqs
        message, self.constraints = self.constraints, None
        if input_batch.num_draft_tokens_per_req is None and rows.shape[0] > 0:
            return self._dummy(rows, num_reqs)

        slots = self.slots
        num_logits = (
            input_batch.cu_num_logits[1 : num_reqs + 1] - input_batch.cu_num_logits[:num_reqs]
        )
        num_rows = torch.zeros(slots.num_slots, dtype=torch.int32, device=slots.device)
        num_rows[input_batch.idx_mapping] = num_logits.to(torch.int32)

        logprobs = None
        constraints = None
        if rows.shape[0] > 0:
            if message is not None:
                constraints = ConstraintTensors.build(
                    message, input_batch, slots.num_slots, slots.device
                )
            logprobs = self._fill_statistics(rows, input_batch, constraints)
        num_valid, free_from, free_to = self._unconstrained
        if constraints is not None:
            num_valid, free_from, free_to = (
                constraints.num_valid,
                constraints.free_from,
                constraints.free_to,
            )
        output = self.canvas_step(
            self._statistics,
            num_rows,
            self._starting(input_batch),
            self.sampling_states.seeds.gpu[: slots.num_slots],
            num_valid,
            free_from,
            free_to,
        )
        return self._engine_output(output, input_batch, num_logits, logprobs)

    def _starting(self, input_batch: InputBatch) -> Tensor:
        """[R], bool: slots whose last prompt token was in this pass. Known on the host."""
        finished = input_batch.is_prefilling_np & (
            input_batch.num_computed_prefill_tokens_np + input_batch.num_scheduled_tokens
            >= input_batch.prefill_len_np
        )
        starting = np.zeros(self.slots.num_slots, dtype=bool)
        starting[input_batch.idx_mapping_np[finished]] = True
        return async_tensor_h2d(starting, device=self.slots.device)

    def _fill_statistics(
        self, rows: Tensor, input_batch: InputBatch, constraints: ConstraintTensors | None
    ) -> LogprobsTensors | None:
        """Project the rows and scatter their statistics to (slot, position)."""
        slots, states = self.slots, self.sampling_states
        slots_np = input_batch.idx_mapping_np
        row_slots = input_batch.expanded_idx_mapping.long()
        row_positions = input_batch.expanded_local_pos.long()
        temperature = schedule_temperature(slots)

        num_logprobs = states.max_num_logprobs(slots_np)
        num_token_ids = self.logprob_token_ids_state.max_num_token_ids(slots_np)
        wants_logprobs = num_logprobs >= 0 or num_token_ids > 0
        filtered = (
            np.any(states.top_k.np[slots_np] != self.vocab_size)
            or np.any(states.top_p.np[slots_np] != 1.0)
            or np.any(states.min_p.np[slots_np] != 0.0)
        )

        parts = []
        for start in range(0, rows.shape[0], self.max_chunk_rows):
            chunk = slice(start, min(start + self.max_chunk_rows, rows.shape[0]))
            slot, position = row_slots[chunk], row_positions[chunk]
            raw = self._mask_to_allowed(self.project(rows[chunk]), input_batch, chunk)
            logits = self.adjustments.apply(raw, input_batch, chunk)
            if constraints is not None:
                logits = constraints.apply(logits, chunk)
            row_temperature = temperature[slot][:, None]
            scaled = logits / row_temperature
            filters = None
            if filtered:
                filters = CandidateFilters(
                    states.top_k.gpu[slot], states.top_p.gpu[slot], states.min_p.gpu[slot]
                )
            statistics = row_statistics(
                scaled,
                states.temperature.gpu[slot],
                states.seeds.gpu[slot],
                slots.canvas_idx[slot],
                slots.step[slot],
                position,
                filters,
            )
            for target, values in zip(self._statistics, statistics, strict=True):
                target[slot, position] = values
            if self.store_soft_embeds is not None:
                probs = scaled.softmax(dim=-1)
                if constraints is not None:
                    probs = torch.where(constraints.restart[chunk, None], 0.0, probs)
                self.store_soft_embeds(probs, slot, position)
            if wants_logprobs:
                reported = raw if self.reports_raw else logits
                # A read-only canvas reports the model's own distribution, at temperature 1.
                reported = torch.where(
                    slots.read_only[slot][:, None], reported, reported / row_temperature
                )
                parts.append(
                    compute_topk_scores(
                        reported,
                        max(num_logprobs, 0),
                        statistics.argmax,
                        logprob_token_ids_state=(
                            self.logprob_token_ids_state if num_token_ids > 0 else None
                        ),
                        expanded_idx_mapping=(slot.to(torch.int32) if num_token_ids > 0 else None),
                        max_per_req_token_ids=num_token_ids,
                        logits_mode=self.logits_mode,
                    )
                )
        if not wants_logprobs:
            return None
        return self._logprobs.exchange(
            parts, row_slots, row_positions, slots.encoding, input_batch.cu_num_logits_np
        )

    def _mask_to_allowed(self, logits: Tensor, input_batch: InputBatch, chunk: slice) -> Tensor:
        """Leave only a constrained request's ids in its rows of ``logits``, in place."""
        if not self.slots.allowed_ids:
            return logits
        starts = input_batch.cu_num_logits_np
        for i, slot in enumerate(input_batch.idx_mapping_np.tolist()):
            allowed = self.slots.allowed_ids.get(slot)
            low = max(int(starts[i]), chunk.start) - chunk.start
            high = min(int(starts[i + 1]), chunk.stop) - chunk.start
            if allowed is not None and low < high:
                masked = torch.full_like(logits[low:high], float("-inf"))
                masked[:, allowed] = logits[low:high][:, allowed]
                logits[low:high] = masked
        return logits

    def _engine_output(
        self,
        output: StepOutput,
        input_batch: InputBatch,
        num_logits: Tensor,
        logprobs: LogprobsTensors | None,
    ) -> SamplerOutput:
        batch_slots = input_batch.idx_mapping
        num_sampled = output.num_emitted[batch_slots]
        # Draft tokens are what the engine hands to the scheduler's constraints; the canvas itself
        # goes into the next pass from its slot.
        drafts = self.req_states.draft_tokens
        result = output.tokens[batch_slots]
        drafts[batch_slots, : self.slots.canvas_length] = result.to(drafts.dtype)
        return SamplerOutput(
            sampled_token_ids=output.tokens[batch_slots].to(torch.int32),
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            # Rows that are not encoded do not advance the sequence: those of a step that emits its
            # canvas are not, those of a pass that emits what it encodes are.
            num_rejected=num_logits.to(torch.int32) - (0 if self.emits_when_done else num_sampled),
        )

    def _dummy(self, rows: Tensor, num_reqs: int) -> SamplerOutput:
        """The engine's memory profile: touch what a real pass of as many rows would allocate."""
        for start in range(0, rows.shape[0], self.max_chunk_rows):
            logits = self.project(rows[start : start + self.max_chunk_rows])
            zeros = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
            row_statistics(logits, torch.ones_like(logits[:, 0]), zeros, zeros, zeros, zeros, None)
        none = torch.zeros(num_reqs, dtype=torch.int32, device=rows.device)
        return SamplerOutput(
            sampled_token_ids=none[:, None],
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=none,
            num_rejected=none,
        )


class LogprobsStash:
    """Log-probabilities wait here between the step that decided a canvas and its encode pass.

    Every pass returns rows for every request of the batch, decided or not, because only the
    device knows which requests emit; the engine takes as many as a request emitted.
    """

    def __init__(self, num_slots: int, canvas_length: int, device: torch.device) -> None:
        self._shape = (num_slots, canvas_length)
        self._device = device
        self._width = 0
        self._ids = torch.empty(0)
        self._logprobs = torch.empty(0)
        self._ranks = torch.empty(0)

    def _grow(self, width: int) -> None:
        if width <= self._width:
            return
        R, C = self._shape
        ids = torch.zeros(R, C, width, dtype=torch.int64, device=self._device)
        logprobs = torch.full(
            (R, C, width), float("-inf"), dtype=torch.float32, device=self._device
        )
        if self._width:
            ids[..., : self._width] = self._ids
            logprobs[..., : self._width] = self._logprobs
        else:
            self._ranks = torch.zeros(R, C, dtype=torch.int64, device=self._device)
        self._ids, self._logprobs, self._width = ids, logprobs, width

    def exchange(
        self,
        parts: list[LogprobsTensors],
        row_slots: Tensor,
        row_positions: Tensor,
        encoding: Tensor,
        cu_num_logits_np: np.ndarray,
    ) -> LogprobsTensors:
        """Stash what this pass computed, and return what each row's request may emit now.

        Args:
            parts: This pass's log-probabilities, in row order.
            row_slots: [num_rows], int64.
            row_positions: [num_rows], int64.
            encoding: [R], bool: slots whose rows are a finished canvas, whose log-probabilities
                were computed before.
            cu_num_logits_np: [num_reqs + 1], where each request's rows start.
        """
        ids = torch.cat([part.logprob_token_ids for part in parts]).long()
        logprobs = torch.cat([part.logprobs for part in parts])
        ranks = torch.cat([part.selected_token_ranks for part in parts])
        width = ids.shape[1]
        self._grow(width)
        encoded = encoding[row_slots]
        stashed_ids = self._ids[row_slots, row_positions]
        stashed_logprobs = self._logprobs[row_slots, row_positions]
        stashed_ranks = self._ranks[row_slots, row_positions]
        pad = self._width - width
        ids = torch.nn.functional.pad(ids, (0, pad))
        logprobs = torch.nn.functional.pad(logprobs, (0, pad), value=float("-inf"))
        ids = torch.where(encoded[:, None], stashed_ids, ids)
        logprobs = torch.where(encoded[:, None], stashed_logprobs, logprobs)
        ranks = torch.where(encoded, stashed_ranks, ranks)
        self._ids[row_slots, row_positions] = ids
        self._logprobs[row_slots, row_positions] = logprobs
        self._ranks[row_slots, row_positions] = ranks
        return LogprobsTensors(
            logprob_token_ids=ids,
            logprobs=logprobs,
            selected_token_ranks=ranks,
            cu_num_generated_tokens=cu_num_logits_np[:-1].tolist(),
        )
