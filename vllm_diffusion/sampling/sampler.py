"""The sampler that the model runner calls after each forward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from vllm_diffusion.canvas.slots import CanvasSlots, Phase
from vllm_diffusion.canvas.step import (
    CanvasStep,
    SlotPass,
    SlotStatistics,
    StepOutput,
    temperatures,
)
from vllm_diffusion.sampling.candidate_filters import CandidateFilters
from vllm_diffusion.sampling.canvas_views import CanvasViewConnector
from vllm_diffusion.sampling.constraint_tensors import ConstraintTensors
from vllm_diffusion.sampling.logprobs import LogprobsRequest, LogprobsStash
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.row_adjustments import RowAdjustments
from vllm_diffusion.sampling.row_requests import FilteredRows, ReportedRows, RowRequests
from vllm_diffusion.sampling.seed_rows import seeding_requests, with_seed_rows
from vllm_diffusion.sampling.vocabulary_stream import sample_rows


class DiffusionSampler:
    """One denoising step: rows -> statistics -> rule -> committed tokens -> engine output.

    Nothing here reads a value from the device.
    """

    def __init__(
        self,
        stock_sampler: Any,
        slots: CanvasSlots,
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
            head: The projection onto the vocabulary.
            store_soft_embeds: (soft embeddings [num_rows, hidden_size] float32, slot [num_rows],
                position [num_rows]), for self-conditioning; called if ``head`` has an embedding.
            vocab_size: Number of token ids.
            max_rows: Rows of the largest pass.
            converge_at_end: Judge a canvas by its positions up to its first end token.
            emits_when_done: Whether a canvas is emitted when it converges, to be encoded as known
                tokens are.
            compile_backend: Backend of ``torch.compile`` for the step; ``None`` runs eagerly.
        """
        self.sampling_states = stock_sampler.sampling_states
        self.logprob_token_ids_state = stock_sampler.logprob_token_ids_state
        # The runner counts committed tokens in it.
        self.penalties_state = stock_sampler.penalties_state
        self.adjustments = RowAdjustments(stock_sampler, vocab_size, slots.device)
        self.logits_mode = stock_sampler.logprobs_mode in ("raw_logits", "processed_logits")
        self.reports_raw = stock_sampler.logprobs_mode in ("raw_logits", "raw_logprobs")
        self.slots = slots
        self.spec = slots.spec
        self.head = head
        self.store_soft_embeds = store_soft_embeds
        self.vocab_size = vocab_size
        self.canvas_step = CanvasStep(
            slots,
            converge_at_end=converge_at_end,
            emits_when_done=emits_when_done,
            compile_backend=compile_backend,
        )
        self.plain_step = GraphedFunction(self._plain_step)
        self.max_rows = min(max_rows, slots.num_slots * slots.canvas_length)
        R, C, device = slots.num_slots, slots.canvas_length, slots.device

        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(R, C, dtype=dtype, device=device)

        self._statistics = SlotStatistics(
            argmax=zeros(torch.int64),
            candidate=zeros(torch.int64),
            entropy=zeros(torch.float32),
            drawn_confidence=zeros(torch.float32),
        )
        # Likeliest tokens that the rule looks at.
        self.num_choices = slots.spec.rule.num_choices
        if self.num_choices > 0:
            self._statistics = self._statistics._replace(
                confidence=zeros(torch.float32),
                choices=torch.zeros(R, C, self.num_choices, dtype=torch.int64, device=device),
            )
        self._logprobs = LogprobsStash(R, C, device)
        self._idle = SlotPass.idle(R, device)
        # The compiled step sees the same tensors in every pass, so that it is compiled once.
        self._slot_pass = SlotPass.idle(R, device)
        self.views = CanvasViewConnector(slots, self._slot_pass.num_rows, self._statistics.entropy)

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

    def select_rows(
        self, hidden_states: Tensor, input_batch: InputBatch
    ) -> tuple[Tensor, InputBatch, np.ndarray | None]:
        """The hidden rows that are projected.

        Args:
            hidden_states: [num_tokens, hidden_size], of the pass.
            input_batch: The batch that ran.

        Returns:
            The rows, [num_rows, hidden_size]; the batch, as if these were its canvas rows; and
            [num_reqs], bool, requests whose one row gives their next canvas's first token, ``None``
            if there are none.
        """
        seeding = seeding_requests(input_batch) if self.spec.is_seeded else None
        index = input_batch.logits_indices
        if self.spec.is_shifted:
            # A row says what stands behind it. Nothing has to be said of a canvas's first position;
            # its last row says what the next canvas begins with.
            first = input_batch.expanded_local_pos == 0
            index = torch.where(first, index + self.slots.canvas_length - 1, index - 1)
        batch = input_batch
        if seeding is not None:
            batch = with_seed_rows(input_batch, index, seeding)
            index = batch.logits_indices
        return hidden_states[index], batch, seeding

    def __call__(
        self,
        rows: Tensor,
        input_batch: InputBatch,
        message: CanvasConstraints | None = None,
        seeding: np.ndarray | None = None,
    ) -> SamplerOutput:
        """Sample one pass of the whole batch.

        Args:
            rows: [num_rows, hidden_size], hidden states: see :meth:`select_rows`.
            input_batch: The batch that ran.
            message: Constraints of the scheduler.
            seeding: [num_reqs], bool: see :meth:`select_rows`.
        """
        self.views.begin_pass()
        num_reqs = input_batch.num_reqs
        slots, states = self.slots, self.sampling_states
        num_logits = (
            input_batch.cu_num_logits[1 : num_reqs + 1] - input_batch.cu_num_logits[:num_reqs]
        ).to(torch.int32)
        slot_pass = self._idle._replace(
            num_rows=torch.zeros(slots.num_slots, dtype=torch.int32, device=slots.device),
            seed=states.seeds.gpu[: slots.num_slots],
        )
        if seeding is not None:
            seeds = async_tensor_h2d(seeding, device=slots.device)
            num_logits = torch.where(seeds, 0, num_logits)
            slot_pass = slot_pass._replace(seeding=slot_pass.seeding.clone())
            slot_pass.seeding[input_batch.idx_mapping] = seeds
        slot_pass.num_rows[input_batch.idx_mapping] = num_logits
        if rows.shape[0] == 0:
            output = self._decide(slot_pass)
            return self._engine_output(output, input_batch, num_logits, None)

        slot = input_batch.expanded_idx_mapping.long()
        position = input_batch.expanded_local_pos.long()
        row_at = input_batch.positions[input_batch.logits_indices]
        requested = states.temperature.gpu[: slots.num_slots]
        constraints = None
        if message is not None:
            constraints = ConstraintTensors.build(
                message, input_batch, slots.num_slots, slots.device
            )
        drawn_at = partial(self._drawn_at, row_at, slot, slot_pass)
        adjustments = self.adjustments.bind(input_batch, constraints, drawn_at)
        filtered = self._filtered_rows(input_batch)
        reported = self._reported_rows(input_batch, adjustments)
        if adjustments is None and filtered is None and reported is None:
            output = self.plain_step(
                rows,
                slot,
                position,
                row_at,
                slot_pass.num_rows,
                slot_pass.seed,
                slot_pass.seeding,
                requested,
            )
            return self._engine_output(output, input_batch, num_logits, None)

        draws = self._draws(slot, position, row_at, slot_pass, requested)
        requests = RowRequests(draws, adjustments, filtered, reported, self.num_choices)
        logprobs = self._sample(rows, slot, position, requests, constraints)
        if constraints is not None:
            slot_pass = slot_pass._replace(
                num_valid=constraints.num_valid,
                free_from=constraints.free_from,
                free_to=constraints.free_to,
            )
        committed = slots.phase == int(Phase.COMMITTING)
        output = self._decide(slot_pass)
        if logprobs is not None:
            verifies = self.spec.rule.commit_verifies
            exchange = self._verified_logprobs if verifies else self._exchange_logprobs
            logprobs = exchange(logprobs, slot, position, output, committed, input_batch, seeding)
        return self._engine_output(output, input_batch, num_logits, logprobs)

    def capture(self, capture: Capture, max_canvases: int, hidden: Tensor) -> None:
        """Capture the plain step for 1 to ``max_canvases`` whole canvases.

        Args:
            capture: Makes a graph of a call.
            max_canvases: At most the number of slots.
            hidden: [max_canvases * canvas_length, hidden_size], rows that graphs read from.
        """
        slots, device = self.slots, self.slots.device
        indices = torch.zeros(3, hidden.shape[0], dtype=torch.int64, device=device)
        fixed = (
            # No slot has rows, so a capture changes nobody's canvas.
            torch.zeros(slots.num_slots, dtype=torch.int32, device=device),
            torch.zeros(slots.num_slots, dtype=torch.int64, device=device),
            torch.zeros(slots.num_slots, dtype=torch.bool, device=device),
            torch.ones(slots.num_slots, dtype=torch.float32, device=device),
        )
        for n in range(max_canvases, 0, -1):
            rows = slice(n * slots.canvas_length)
            self.plain_step.capture(
                capture, hidden[rows], *(index[rows] for index in indices), *fixed
            )

    def _plain_step(
        self,
        rows: Tensor,
        slot: Tensor,
        position: Tensor,
        row_at: Tensor,
        num_rows: Tensor,
        seed: Tensor,
        seeding: Tensor,
        requested: Tensor,
    ) -> StepOutput:
        """A pass in which nobody asks for more than temperatures and seeds.

        Args:
            rows: [num_rows, hidden_size].
            slot: [num_rows], int64.
            position: [num_rows], int64.
            row_at: [num_rows], int64, where each row is in its sequence.
            num_rows: [R], int32: see :class:`SlotPass`, here and below.
            seed: [R], int64.
            seeding: [R], bool.
            requested: [R], float32, temperatures of the requests.
        """
        slot_pass = self._idle._replace(num_rows=num_rows, seed=seed, seeding=seeding)
        draws = self._draws(slot, position, row_at, slot_pass, requested)
        requests = RowRequests(draws, num_choices=self.num_choices)
        self._sample(rows, slot, position, requests, None)
        return self._decide(slot_pass)

    def _drawn_at(self, row_at: Tensor, slot: Tensor, slot_pass: SlotPass) -> Tensor:
        """[num_rows], int64: where in its sequence the token stands that each row draws."""
        if self.spec.is_shifted:
            return row_at + 1
        if self.spec.is_seeded:
            return row_at + self._is_committed_or_seeding(slot, slot_pass).to(row_at.dtype)
        return row_at

    def _is_committed_or_seeding(self, slot: Tensor, slot_pass: SlotPass) -> Tensor:
        """[num_rows], bool: rows of known or decided tokens, that say what is behind them."""
        committed = self.slots.phase == int(Phase.COMMITTING)
        return (committed | slot_pass.seeding)[slot]

    def _draws(
        self, slot: Tensor, position: Tensor, row_at: Tensor, slot_pass: SlotPass, requested: Tensor
    ) -> RowDraws:
        """What rows are divided by, and what their draws are keyed by."""
        slots = self.slots
        judged, drawn = temperatures(slots, requested)
        draws = RowDraws(
            judged[slot],
            drawn[slot],
            slot_pass.seed[slot],
            slots.canvas_idx[slot],
            slots.step[slot],
            position.to(torch.int32),
        )
        if not self.spec.is_seeded:
            return draws
        is_seed = self._is_committed_or_seeding(slot, slot_pass)
        scale = draws.request_temperature
        if self.spec.rule.commit_verifies:
            # However the answer was cut into canvases, a token is drawn with the same noise. Drafts
            # are greedy.
            zero = torch.zeros_like(draws.step)
            return draws._replace(
                request_temperature=torch.where(is_seed, scale, 0.0),
                canvas_idx=zero,
                step=zero,
                position=self._drawn_at(row_at, slot, slot_pass).to(torch.int32),
            )
        # A canvas's first token is drawn before its first step, and where no position of it is.
        committed = slots.phase == int(Phase.COMMITTING)
        if self.spec.seeds_greedily:
            scale = torch.where(is_seed, 0.0, scale)
        return draws._replace(
            request_temperature=scale,
            canvas_idx=draws.canvas_idx + committed[slot].to(torch.int32),
            step=torch.where(is_seed, 0, draws.step),
            position=torch.where(is_seed, self.slots.canvas_length, draws.position),
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
            (self._statistics.drawn_confidence, results.drawn_confidence),
            (self._statistics.confidence, results.confidence),
            (self._statistics.choices, results.choices),
        ):
            if target is not None and values is not None:
                target[slot, position] = values
        if results.soft_embeds is not None:
            soft_embeds = results.soft_embeds
            if constraints is not None:
                soft_embeds = torch.where(constraints.restart[:, None], 0.0, soft_embeds)
            self.store_soft_embeds(soft_embeds, slot, position)
        return results.logprobs

    def _decide(self, slot_pass: SlotPass) -> StepOutput:
        """What becomes of every canvas."""
        for held, given in zip(self._slot_pass, slot_pass, strict=True):
            held.copy_(given)
        return self.canvas_step(self._statistics, self._slot_pass)

    def _exchange_logprobs(
        self,
        computed: LogprobsTensors,
        slot: Tensor,
        position: Tensor,
        step: StepOutput,
        committed: Tensor,
        input_batch: InputBatch,
        seeding: np.ndarray | None,
    ) -> LogprobsTensors:
        """What each request may emit of its log-probabilities now.

        Args:
            computed: Of the rows.
            slot: [num_rows], int64.
            position: [num_rows], int64.
            step: What became of the canvases.
            committed: [R], bool, those that this pass committed.
            input_batch: The batch, as :meth:`select_rows` returned it.
            seeding: See :meth:`select_rows`.
        """
        spec = self.spec
        # A token is reported as it was when it was revealed, or rewritten; without a mask as it is
        # in the last step, but for who is told which step decided it.
        is_decided = ~step.decided[slot, position]
        if spec.mask_token_id is None:
            is_decided = is_decided & self.slots.maps_steps[slot]
        is_decided = is_decided | committed[slot]
        num_rows = np.diff(input_batch.cu_num_logits_np[: input_batch.num_reqs + 1])
        reported = np.arange(len(slot))
        if seeding is not None:
            reported = np.flatnonzero(~np.repeat(seeding, num_rows))
            num_rows = num_rows - seeding
        index = async_tensor_h2d(reported, device=slot.device)
        if spec.is_aligned:
            # The known tokens that a canvas begins with are not emitted.
            index = (index + step.num_given[slot[index]]).clamp(max=len(slot) - 1)
        starts = np.concatenate([[0], np.cumsum(num_rows)])
        output = self._logprobs.exchange(computed, slot, position, is_decided, index, starts)
        if spec.is_seeded:
            # What stands behind a canvas that is committed is the next one's first token.
            ends = input_batch.cu_num_logits_np[1 : input_batch.num_reqs + 1]
            last = ends - (num_rows if spec.is_shifted else 1)
            row = async_tensor_h2d(last[num_rows > 0].astype(np.int64), device=slot.device)
            self._logprobs.begin(computed, row, slot[row], committed[slot[row]])
        return output

    def _verified_logprobs(
        self,
        computed: LogprobsTensors,
        slot: Tensor,
        position: Tensor,
        step: StepOutput,
        committed: Tensor,
        input_batch: InputBatch,
        seeding: np.ndarray | None,
    ) -> LogprobsTensors:
        """As :meth:`_exchange_logprobs`, where each row of a commit says what is behind it.

        A canvas's first token waits for them since it was drawn; the others were drawn by the row
        before theirs.
        """
        row = torch.arange(len(slot), device=slot.device)
        is_first = position == 0
        before = torch.where(is_first, row, row - 1)
        of_tokens = LogprobsTensors(
            computed.logprob_token_ids[before],
            computed.logprobs[before],
            computed.selected_token_ranks[before],
        )
        num_rows = np.diff(input_batch.cu_num_logits_np[: input_batch.num_reqs + 1])
        is_seed = np.zeros(len(num_rows), dtype=bool) if seeding is None else seeding
        is_seed_row = async_tensor_h2d(np.repeat(is_seed, num_rows), device=slot.device)
        reported = async_tensor_h2d(
            np.flatnonzero(~np.repeat(is_seed, num_rows)), device=slot.device
        )
        starts = np.concatenate([[0], np.cumsum(num_rows * ~is_seed)])
        output = self._logprobs.exchange(
            of_tokens, slot, position, is_first & ~is_seed_row, reported, starts
        )
        has_canvas = (num_rows > 0) & ~is_seed
        first = async_tensor_h2d(
            input_batch.cu_num_logits_np[: len(num_rows)][has_canvas].astype(np.int64),
            device=slot.device,
        )
        owner = slot[first]
        last = first + (step.num_finished[owner] - 1).clamp(min=0)
        self._logprobs.begin(computed, last, owner, committed[owner])
        return output

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
            # What a masked model commits is what it drew.
            of_drawn=self.spec.mask_token_id is not None,
        )
        if self.reports_raw:
            adjustments = self.adjustments.bind_readable(input_batch)
        if adjustments is not None:
            adjustments = adjustments.rows(async_tensor_h2d(index, device=self.slots.device))
        # A read-only canvas reports the model's own distribution, at temperature 1.
        requested = self.sampling_states.temperature.gpu[: self.slots.num_slots]
        judged, _ = temperatures(self.slots, requested)
        is_plain = self.slots.read_only
        if self.spec.rule.commit_verifies and self.reports_raw:
            # As what draws one token after another reports it.
            is_plain = torch.ones_like(is_plain)
        temperature = torch.where(is_plain[slot], 1.0, judged[slot])
        return ReportedRows(index, request, adjustments, temperature)

    def _engine_output(
        self,
        output: StepOutput,
        input_batch: InputBatch,
        num_logits: Tensor,
        logprobs: LogprobsTensors | None,
    ) -> SamplerOutput:
        self.views.keep(output)
        batch_slots = input_batch.idx_mapping
        num_sampled = output.num_emitted[batch_slots]
        return SamplerOutput(
            sampled_token_ids=output.tokens[batch_slots].to(torch.int32),
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            # Rows that are not encoded do not advance the sequence: those of a step that emits its
            # canvas are not, those of a pass whose keys and values are final are.
            num_rejected=num_logits - output.num_finished[batch_slots],
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
        requests = RowRequests(draws, adjustments, filtered, reported, self.num_choices)
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
