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
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from attention_kernels.vocab_statistics import LogitAdjustments, RowDraws
from vllm_diffusion.canvas.constraints import CanvasConstraints
from vllm_diffusion.canvas.cuda_graphs import Capture, GraphedFunction
from vllm_diffusion.canvas.slots import CanvasSlots
from vllm_diffusion.canvas.step import (
    Noise,
    SlotStatistics,
    StepOutput,
    make_canvas_step,
    schedule_temperature,
)
from vllm_diffusion.decoding.policy import Policy
from vllm_diffusion.sampling.candidate_filters import CandidateFilters
from vllm_diffusion.sampling.constraint_tensors import ConstraintTensors
from vllm_diffusion.sampling.logprobs import LogprobsRequest, LogprobsStash
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.row_adjustments import RowAdjustments
from vllm_diffusion.sampling.row_requests import FilteredRows, ReportedRows, RowRequests
from vllm_diffusion.sampling.vocabulary_stream import sample_rows


class DiffusionSampler:
    """One denoising step: rows -> statistics -> policy -> committed tokens -> engine output.

    Nothing here reads a value from the device.
    """

    def __init__(
        self,
        stock_sampler: Any,
        slots: CanvasSlots,
        policy: Policy,
        noise: Noise,
        *,
        head: OutputHead,
        store_soft_embeds: Callable[[Tensor, Tensor, Tensor], None],
        vocab_size: int,
        max_rows: int,
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
            head: The projection onto the vocabulary.
            store_soft_embeds: (soft embeddings [num_rows, hidden_size] float32, slot [num_rows],
                position [num_rows]), for self-conditioning; called if ``head`` has an embedding.
            vocab_size: Number of token ids.
            max_rows: Rows of the largest pass.
            converge_at_end: Judge a canvas by its positions up to its first end token.
            emits_when_done: Whether a canvas is emitted when it converges, or by the pass after it.
            compile_backend: Backend of ``torch.compile`` for the step; ``None`` runs eagerly.
        """
        self.sampling_states = stock_sampler.sampling_states
        self.logprob_token_ids_state = stock_sampler.logprob_token_ids_state
        self.req_states = stock_sampler.req_states
        # The runner counts committed tokens in it.
        self.penalties_state = stock_sampler.penalties_state
        self.adjustments = RowAdjustments(stock_sampler, vocab_size, slots.device)
        self.logits_mode = stock_sampler.logprobs_mode in ("raw_logits", "processed_logits")
        self.reports_raw = stock_sampler.logprobs_mode in ("raw_logits", "raw_logprobs")
        self.slots = slots
        self.head = head
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
        self.plain_step = GraphedFunction(self._plain_step)
        self.emits_when_done = emits_when_done
        self.max_rows = min(max_rows, slots.num_slots * slots.canvas_length)
        R, C, device = slots.num_slots, slots.canvas_length, slots.device
        self._statistics = SlotStatistics(
            argmax=torch.zeros(R, C, dtype=torch.int64, device=device),
            candidate=torch.zeros(R, C, dtype=torch.int64, device=device),
            entropy=torch.zeros(R, C, dtype=torch.float32, device=device),
            confidence=torch.zeros(R, C, dtype=torch.float32, device=device),
            drawn_confidence=torch.zeros(R, C, dtype=torch.float32, device=device),
        )
        self._logprobs = LogprobsStash(R, C, device)
        self._unconstrained = (
            torch.full((R,), -1, dtype=torch.int32, device=device),
            torch.zeros(R, dtype=torch.int32, device=device),
            torch.zeros(R, dtype=torch.int32, device=device),
        )
        self._step_inputs = (
            torch.zeros(R, dtype=torch.int32, device=device),
            torch.zeros(R, dtype=torch.bool, device=device),
            torch.zeros(R, dtype=torch.int64, device=device),
            *(tensor.clone() for tensor in self._unconstrained),
        )

    def add_request(self, slot: int, sampling_params: Any) -> None:
        self.sampling_states.add_request(slot, sampling_params)
        # The model state has seen the request before.
        readable = self.slots.allowed_ids.get(slot)
        self.adjustments.add_request(slot, sampling_params, readable)
        self.logprob_token_ids_state.add_request(slot, sampling_params)

    def remove_request(self, slot: int) -> None:
        """Forget what the host keeps of a slot; vLLM's states are rewritten by the next owner."""
        self.adjustments.remove_request(slot)

    def apply_staged_writes(self) -> None:
        self.sampling_states.apply_staged_writes()
        self.adjustments.apply_staged_writes()
        self.logprob_token_ids_state.apply_staged_writes()

    def __call__(
        self,
        rows: Tensor,
        input_batch: InputBatch,
        message: CanvasConstraints | None = None,
    ) -> SamplerOutput:
        """Sample one pass of the whole batch.

        Args:
            rows: [num_rows, hidden_size], hidden states of the canvas rows.
            input_batch: The batch that ran.
            message: Constraints of the scheduler.
        """
        num_reqs = input_batch.num_reqs
        slots, states = self.slots, self.sampling_states
        num_logits = (
            input_batch.cu_num_logits[1 : num_reqs + 1] - input_batch.cu_num_logits[:num_reqs]
        )
        num_rows = torch.zeros(slots.num_slots, dtype=torch.int32, device=slots.device)
        num_rows[input_batch.idx_mapping] = num_logits.to(torch.int32)
        starting = self._starting(input_batch)
        seeds = states.seeds.gpu[: slots.num_slots]
        if rows.shape[0] == 0:
            output = self._decide(num_rows, starting, seeds, None)
            return self._engine_output(output, input_batch, num_logits, None)

        slot = input_batch.expanded_idx_mapping.long()
        position = input_batch.expanded_local_pos.long()
        temperatures = states.temperature.gpu[: slots.num_slots]
        constraints = None
        if message is not None:
            constraints = ConstraintTensors.build(
                message, input_batch, slots.num_slots, slots.device
            )
        adjustments = self.adjustments.bind(input_batch, constraints)
        filtered = self._filtered_rows(input_batch)
        reported = self._reported_rows(input_batch, adjustments)
        if adjustments is None and filtered is None and reported is None:
            output = self.plain_step(rows, slot, position, num_rows, starting, seeds, temperatures)
            return self._engine_output(output, input_batch, num_logits, None)

        draws = self._draws(slot, position, seeds, temperatures)
        requests = RowRequests(draws, adjustments, filtered, reported)
        logprobs = self._sample(rows, slot, position, requests, constraints)
        if logprobs is not None:
            logprobs = self._logprobs.exchange(
                logprobs, slot, position, slots.encoding, input_batch.cu_num_logits_np
            )
        output = self._decide(num_rows, starting, seeds, constraints)
        return self._engine_output(output, input_batch, num_logits, logprobs)

    def capture(self, capture: Capture, max_canvases: int, hidden: Tensor) -> None:
        """Capture the plain step for 1 to ``max_canvases`` whole canvases.

        Args:
            capture: Makes a graph of a call.
            max_canvases: At most the number of slots.
            hidden: [max_canvases * canvas_length, hidden_size], rows that graphs read from.
        """
        slots, device = self.slots, self.slots.device
        indices = torch.zeros(2, hidden.shape[0], dtype=torch.int64, device=device)
        fixed = (
            # No slot has rows or starts, so a capture changes nobody's canvas.
            torch.zeros(slots.num_slots, dtype=torch.int32, device=device),
            torch.zeros(slots.num_slots, dtype=torch.bool, device=device),
            torch.zeros(slots.num_slots, dtype=torch.int64, device=device),
            torch.ones(slots.num_slots, dtype=torch.float32, device=device),
        )
        for n in range(max_canvases, 0, -1):
            rows = slice(n * slots.canvas_length)
            self.plain_step.capture(
                capture, hidden[rows], indices[0, rows], indices[1, rows], *fixed
            )

    def _plain_step(
        self,
        rows: Tensor,
        slot: Tensor,
        position: Tensor,
        num_rows: Tensor,
        starting: Tensor,
        seeds: Tensor,
        temperatures: Tensor,
    ) -> StepOutput:
        """A pass in which nobody asks for more than temperatures and seeds.

        Args:
            rows: [num_rows, hidden_size].
            slot: [num_rows], int64.
            position: [num_rows], int64.
            num_rows: [R], int32, rows of each slot.
            starting: [R], bool, slots whose prompt is complete.
            seeds: [R], int64.
            temperatures: [R], float32, of the requests.
        """
        requests = RowRequests(self._draws(slot, position, seeds, temperatures))
        self._sample(rows, slot, position, requests, None)
        return self._decide(num_rows, starting, seeds, None)

    def _draws(
        self, slot: Tensor, position: Tensor, seeds: Tensor, temperatures: Tensor
    ) -> RowDraws:
        slots = self.slots
        return RowDraws(
            schedule_temperature(slots)[slot],
            temperatures[slot],
            seeds[slot],
            slots.canvas_idx[slot],
            slots.step[slot],
            position.to(torch.int32),
        )

    def _sample(
        self,
        rows: Tensor,
        slot: Tensor,
        position: Tensor,
        requests: RowRequests,
        constraints: ConstraintTensors | None,
    ) -> LogprobsTensors | None:
        """Sample the rows and scatter their statistics to (slot, position)."""
        results = sample_rows(self.head, rows, requests, self.vocab_size)
        for target, values in (
            (self._statistics.argmax, results.argmax),
            (self._statistics.candidate, results.candidate),
            (self._statistics.entropy, results.entropy),
            (self._statistics.confidence, results.confidence),
            (self._statistics.drawn_confidence, results.drawn_confidence),
        ):
            target[slot, position] = values
        if results.soft_embeds is not None:
            soft_embeds = results.soft_embeds
            if constraints is not None:
                soft_embeds = torch.where(constraints.restart[:, None], 0.0, soft_embeds)
            self.store_soft_embeds(soft_embeds, slot, position)
        return results.logprobs

    def _decide(
        self,
        num_rows: Tensor,
        starting: Tensor,
        seeds: Tensor,
        constraints: ConstraintTensors | None,
    ) -> StepOutput:
        """What becomes of every canvas."""
        bounds = self._unconstrained
        if constraints is not None:
            bounds = (constraints.num_valid, constraints.free_from, constraints.free_to)
        # The compiled step sees the same tensors in every pass, so that it is compiled once.
        for held, given in zip(
            self._step_inputs, (num_rows, starting, seeds, *bounds), strict=True
        ):
            held.copy_(given)
        return self.canvas_step(self._statistics, *self._step_inputs)

    def _starting(self, input_batch: InputBatch) -> Tensor:
        """[R], bool: slots whose last prompt token was in this pass. Known on the host."""
        finished = input_batch.is_prefilling_np & (
            input_batch.num_computed_prefill_tokens_np + input_batch.num_scheduled_tokens
            >= input_batch.prefill_len_np
        )
        starting = np.zeros(self.slots.num_slots, dtype=bool)
        starting[input_batch.idx_mapping_np[finished]] = True
        return async_tensor_h2d(starting, device=self.slots.device)

    def _filtered_rows(self, input_batch: InputBatch) -> FilteredRows | None:
        """Rows whose requests have top-k, top-p or min-p."""
        states, slots_np = self.sampling_states, input_batch.idx_mapping_np
        used = (
            states.top_k.np[slots_np] != self.vocab_size,
            states.top_p.np[slots_np] != 1.0,
            states.min_p.np[slots_np] != 0.0,
        )
        index, slot = _rows_of(input_batch, np.logical_or.reduce(used))
        if slot is None:
            return None
        values = (states.top_k.gpu, states.top_p.gpu, states.min_p.gpu)
        filters = CandidateFilters(
            *(value[slot] if use.any() else None for value, use in zip(values, used, strict=True))
        )
        return FilteredRows(index, filters)

    def _reported_rows(
        self, input_batch: InputBatch, adjustments: LogitAdjustments | None
    ) -> ReportedRows | None:
        """Rows whose requests want log-probabilities.

        Args:
            input_batch: The batch.
            adjustments: Of all rows.
        """
        ids, slots_np = self.logprob_token_ids_state, input_batch.idx_mapping_np
        num_top = self.sampling_states.num_logprobs[slots_np]
        wanted = (num_top >= 0) | (ids.num_token_ids.np[slots_np] > 0)
        index, slot = _rows_of(input_batch, wanted)
        if slot is None:
            return None
        num_token_ids = ids.max_num_token_ids(slots_np)
        request = LogprobsRequest(
            num_top=max(int(num_top.max()), 0),
            token_ids=ids.token_ids.gpu[slot, :num_token_ids].long(),
            num_token_ids=ids.num_token_ids.gpu[slot],
            as_logits=self.logits_mode,
        )
        if self.reports_raw:
            adjustments = self.adjustments.bind_readable(input_batch)
        if adjustments is not None:
            adjustments = adjustments.rows(async_tensor_h2d(index, device=self.slots.device))
        # A read-only canvas reports the model's own distribution, at temperature 1.
        temperature = torch.where(
            self.slots.read_only[slot], 1.0, schedule_temperature(self.slots)[slot]
        )
        return ReportedRows(index, request, adjustments, temperature)

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

    def profile(self, rows: Tensor) -> None:
        """What the engine's memory profile runs: allocate what the largest pass would.

        Args:
            rows: [num_rows, hidden_size], any hidden states.
        """
        self._profile_rows(rows[:1].repeat(self.max_rows, 1), None)
        # A few rows compile the kernels as they are where somebody adjusts logits.
        few = min(self.max_rows, self.slots.canvas_length)
        self._profile_rows(rows[:1].repeat(few, 1), self.adjustments.none(few))

    def _profile_rows(self, rows: Tensor, adjustments: LogitAdjustments | None) -> None:
        n, device = rows.shape[0], rows.device
        ones = torch.ones(n, device=device)
        zeros = torch.zeros(n, dtype=torch.int32, device=device)
        index = np.arange(n)
        # With filters and log-probabilities rows are kept, and swept once more for each.
        filtered = FilteredRows(index, CandidateFilters(zeros + 1, ones / 2, ones / 2))
        wanted = LogprobsRequest(1, zeros.long()[:, None][:, :0], zeros, as_logits=False)
        reported = ReportedRows(index, wanted, adjustments, ones)
        draws = RowDraws(ones, ones, zeros.long(), zeros, zeros, zeros)
        requests = RowRequests(draws, adjustments, filtered, reported)
        sample_rows(self.head, rows, requests, self.vocab_size)


def _rows_of(input_batch: InputBatch, chosen: np.ndarray) -> tuple[np.ndarray, Tensor | None]:
    """Canvas rows of some requests of a batch: their indices and, on the device, their slots.

    Args:
        input_batch: The batch.
        chosen: [num_reqs], bool.

    Returns:
        Nothing and ``None`` where there are no such requests or they are still at their prompts.
    """
    if not chosen.any():
        return np.empty(0, dtype=np.int64), None
    num_rows = np.diff(input_batch.cu_num_logits_np[: len(chosen) + 1])
    index = np.flatnonzero(np.repeat(chosen, num_rows))
    if index.size == 0:
        return index, None
    slots = np.repeat(input_batch.idx_mapping_np, num_rows)[index].astype(np.int64)
    return index, async_tensor_h2d(slots, device=input_batch.logits_indices.device)
