"""The sampler that the model runner calls after each forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from attention_kernels.vocab_statistics import LogitAdjustments, RowDraws, RowLogits
from vllm_diffusion.canvas.constraints import CanvasConstraints
from vllm_diffusion.canvas.cuda_graphs import Capture, GraphedFunction
from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.canvas.slots import CanvasSlots, Phase
from vllm_diffusion.canvas.step import CanvasStep, SlotStatistics, StepOutput, temperatures
from vllm_diffusion.sampling.candidate_filters import CandidateFilters
from vllm_diffusion.sampling.canvas_views import CanvasViewConnector
from vllm_diffusion.sampling.constraint_tensors import ConstraintTensors
from vllm_diffusion.sampling.logprobs import (
    LogprobsRequest,
    LogprobsStash,
    merge_held,
    row_logprobs,
)
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.row_adjustments import Adjusting, RowAdjustments
from vllm_diffusion.sampling.row_requests import FilteredRows, ReportedRows, RowRequests
from vllm_diffusion.sampling.vocabulary_stream import (
    RowResults,
    draw_filtered,
    rows_in_float32,
    sample_rows,
)
from vllm_diffusion.startup.capture_sizes import MAX_EXACT

# Log-probabilities that graphs report; a server that allows more has none of them.
MAX_GRAPHED_LOGPROBS = 32


class DiffusionSampler:
    """One denoising step: rows -> statistics -> rule -> committed tokens -> engine output.

    Nothing here reads a value from the device.
    """

    def __init__(
        self,
        stock_sampler: Any,
        slots: CanvasSlots,
        pass_rows: PassRows,
        *,
        head: OutputHead,
        store_soft_embeds: Callable[[Tensor, Tensor, Tensor], None],
        vocab_size: int,
        max_rows: int,
        max_logprobs: int,
        converge_at_end: bool,
        emits_when_done: bool,
        compile_backend: str | None,
    ) -> None:
        """Bind the sampler to a model.

        Args:
            stock_sampler: vLLM's sampler, whose per-request states are reused.
            slots: The canvases.
            pass_rows: Laid out before each call.
            head: The projection onto the vocabulary.
            store_soft_embeds: (soft embeddings [num_rows, hidden_size] float32, slot [num_rows],
                position [num_rows]), for self-conditioning; called if ``head`` has an embedding.
            vocab_size: Number of token ids.
            max_rows: Rows of the largest pass.
            max_logprobs: Log-probabilities that a request may ask for; -1 for those of all tokens.
            converge_at_end: Judge a canvas by its positions up to its first end token.
            emits_when_done: Whether a canvas is emitted when it converges, to be encoded as known
                tokens are.
            compile_backend: Backend of ``torch.compile`` for the step; ``None`` runs eagerly.
        """
        self.sampling_states = stock_sampler.sampling_states
        self.logprob_token_ids_state = stock_sampler.logprob_token_ids_state
        # The runner counts committed tokens in it.
        self.penalties_state = stock_sampler.penalties_state
        self.req_states = stock_sampler.req_states
        self.logits_mode = stock_sampler.logprobs_mode in ("raw_logits", "processed_logits")
        self.reports_raw = stock_sampler.logprobs_mode in ("raw_logits", "raw_logprobs")
        self.slots = slots
        self.pass_rows = pass_rows
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
        # A pass in which somebody asks for more, in parts.
        self.adjusted_rows = GraphedFunction(self._adjusted_rows)
        self.filtered_rows = GraphedFunction(self._filtered_rows)
        self.reported_rows = GraphedFunction(self._reported_rows)
        self.decide = GraphedFunction(self._decide)
        self.max_logprobs = max_logprobs
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
        # Hidden rows that graphs read, and the reports that they write, where there are any.
        self._hidden: Tensor | None = None
        self._reports: LogprobsTensors | None = None
        self.constraints = ConstraintTensors(pass_rows, vocab_size)
        self.adjustments = RowAdjustments(
            stock_sampler,
            self.constraints,
            num_slots=R,
            vocab_size=vocab_size,
            device=device,
        )
        self._graphed_offsets = self.adjustments.offsets
        # vLLM keeps what requests ask for where the host writes it, in turn in one of several places.
        # These are copied when a request comes, and stay where they are.
        self._requested = torch.ones(R, dtype=torch.float32, device=device)
        self._filters = CandidateFilters(
            torch.full((R,), vocab_size, dtype=torch.int32, device=device),
            torch.ones(R, dtype=torch.float32, device=device),
            torch.zeros(R, dtype=torch.float32, device=device),
        )
        self._is_staged = False
        self.views = CanvasViewConnector(
            slots, pass_rows.of_slots.num_rows, self._statistics.entropy
        )

    def add_request(self, slot: int, sampling_params: Any) -> None:
        self._is_staged = True
        self.sampling_states.add_request(slot, sampling_params)
        # The model state has seen the request before.
        readable = self.slots.allowed_ids.get(slot)
        self.adjustments.add_request(slot, sampling_params, readable)
        self.logprob_token_ids_state.add_request(slot, sampling_params)

    def remove_request(self, slot: int) -> None:
        """Forget what the host keeps of a slot; vLLM's states are rewritten by the next owner."""
        self.adjustments.remove_request(slot)

    def apply_staged_writes(self) -> None:
        """Copy to the device what new requests asked for, if there are any."""
        if not self._is_staged:
            return
        self._is_staged = False
        states = self.sampling_states
        states.apply_staged_writes()
        self.adjustments.apply_staged_writes()
        self.logprob_token_ids_state.apply_staged_writes()
        fixed = (self.pass_rows.of_slots.seed, self._requested, *self._filters)
        given = (states.seeds, states.temperature, states.top_k, states.top_p, states.min_p)
        for held, values in zip(fixed, given, strict=True):
            assert held is not None
            held.copy_(values.gpu[: self.slots.num_slots])

    def select_rows(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden_size]: the hidden rows that are projected.

        Args:
            hidden_states: [num_tokens, hidden_size], of the pass.
        """
        n, held = self.pass_rows.num_rows, self._hidden
        out = held[:n] if held is not None and n <= len(held) else None
        return torch.index_select(hidden_states, 0, self.pass_rows.hidden_index[:n], out=out)

    def __call__(
        self, rows: Tensor, input_batch: InputBatch, message: GrammarOutput | None = None
    ) -> SamplerOutput:
        """Sample one pass of the whole batch.

        Args:
            rows: [num_rows, hidden_size], hidden states: see :meth:`select_rows`.
            input_batch: The batch that ran.
            message: Constraints of our scheduler. vLLM's warm-up sends a plain message, which
                constrains nothing.
        """
        if not isinstance(message, CanvasConstraints):
            message = None
        self.views.begin_pass()
        if len(rows) == 0:
            return self._engine_output(self.decide(), None)
        places = self.pass_rows
        num_masks = None if message is None else self.constraints.take(message, input_batch.req_ids)
        slots = places.slots_np[np.diff(places.starts) > 0]
        asked = self.adjustments.asked_by(slots, num_masks)
        filtered, reported = self._rows_with_filters(), self._rows_with_reports()
        if asked is None and filtered is None and reported is None:
            return self._engine_output(self.plain_step(rows), None)

        if message is None:
            self.constraints.clear()
        # Of the canvases as the pass found them.
        committed = pinned = held = None
        if reported is not None:
            committed = self.slots.phase == int(Phase.COMMITTING)
            pinned = self.slots.pinned.clone()
        if self._has_graphs(rows, reported):
            self.adjusted_rows(rows)
            logprobs = self._replay_kept(filtered, reported)
        else:
            requests = self._row_requests(len(rows), asked, filtered, reported)
            results = self._sample(rows, requests)
            logprobs, held = results.logprobs, results.held_logprobs
        output = self.decide()
        if held is not None and logprobs is not None:
            slot, position = self._places(slice(places.num_rows))
            # Rows of a pass that writes known tokens tell what is drawn behind them.
            keeps = output.denoised[slot] & ~output.decided[slot, position]
            logprobs = merge_held(held, logprobs, keeps)
        if logprobs is not None and committed is not None and pinned is not None:
            logprobs = self._exchange_logprobs(logprobs, output, committed, pinned)
        return self._engine_output(output, logprobs)

    def capture(self, capture: Capture, canvas_counts: range, hidden: Tensor) -> None:
        """Capture steps of some numbers of whole canvases, and the parts of adjusted ones.

        Args:
            capture: Makes a graph of a call.
            canvas_counts: The numbers, the largest first.
            hidden: [most canvases * canvas_length, hidden_size], rows that graphs read from.
        """
        C = self.slots.canvas_length
        self._hidden = hidden
        self.adjustments.reserve()
        self._graphed_offsets = self.adjustments.offsets
        self.constraints.clear()
        # No slot has rows, so a capture changes nobody's canvas.
        self.pass_rows.clear()
        for n in canvas_counts:
            self.plain_step.capture(capture, hidden[: n * C])
        for n in sorted({min(n, MAX_EXACT) for n in canvas_counts}, reverse=True):
            self.adjusted_rows.capture(capture, hidden[: n * C])
        some = torch.zeros(C, dtype=torch.int64, device=hidden.device)
        self.filtered_rows.capture(capture, some)
        if 0 <= self.max_logprobs <= MAX_GRAPHED_LOGPROBS:
            self._reports = self._no_reports(len(hidden), 1 + self.max_logprobs)
            self.reported_rows.capture(capture, some.clone())
        self.decide.capture(capture)

    def drop_graphs(self) -> None:
        """Give up what was captured."""
        for function in (
            self.plain_step,
            self.adjusted_rows,
            self.filtered_rows,
            self.reported_rows,
            self.decide,
        ):
            function.drop()
        self._hidden = self._reports = None

    def _plain_step(self, rows: Tensor) -> StepOutput:
        """A pass in which nobody asks for more than temperatures and seeds.

        Args:
            rows: [num_rows, hidden_size].
        """
        self._sample(rows, self._row_requests(len(rows)))
        return self._decide()

    def _adjusted_rows(self, rows: Tensor) -> None:
        """Statistics of a pass in which somebody may have adjustments.

        Args:
            rows: [num_rows, hidden_size].
        """
        self._sample(rows, self._row_requests(len(rows), self.adjustments.everything()))

    def _filtered_rows(self, index: Tensor) -> None:
        """New candidates of rows with filters, once the statistics of all are known.

        Args:
            index: [num_rows], int64: which of the pass; the same one again is no harm.
        """
        slot, position = self._places(index)
        projected, adjustments = self._project_again(index)
        candidate, confidence = draw_filtered(
            self.head,
            projected,
            self._draws(index),
            adjustments,
            self._filters.rows(slot),
            self.vocab_size,
        )
        self._statistics.candidate[slot, position] = candidate
        self._statistics.drawn_confidence[slot, position] = confidence

    def _reported_rows(self, index: Tensor) -> None:
        """Log-probabilities of rows, once their tokens are known.

        Args:
            index: [num_rows], int64: which of the pass; the same one again is no harm.
        """
        assert self._reports is not None
        slot, position = self._places(index)
        projected, adjustments = self._project_again(index)
        num_top = self._reports.logprobs.shape[1] - 1
        request = self._report_request(num_top, index[:, None][:, :0], torch.zeros_like(slot))
        if self.reports_raw:
            adjustments = self.adjustments.bind_readable(slot)
        of_tokens = self._statistics.candidate if request.of_drawn else self._statistics.argmax
        computed = row_logprobs(
            RowLogits(projected, self.head.first_id, self.head.softcap, adjustments),
            self._reported_temperature(slot),
            of_tokens[slot, position],
            request,
            self.head,
            rows_in_float32(self.head, len(index)),
        )
        for held, values in zip(_tensors(self._reports), _tensors(computed), strict=True):
            held[index] = values.to(held.dtype)

    def _project_again(self, index: Tensor) -> tuple[Tensor, LogitAdjustments]:
        """Of rows of the pass: [num_rows, num_ids], logits of all ids; and their adjustments."""
        assert self._hidden is not None
        projected = self.head.project(self._hidden[index], slice(0, len(self.head.weight)))
        slot, _ = self._places(index)
        everything = self.adjustments.everything()
        return projected, self.adjustments.bind(everything, index, slot, self._drawn_at(index))

    def _has_graphs(self, rows: Tensor, reported: np.ndarray | None) -> bool:
        """Whether a pass with settings is captured in parts."""
        if not self.adjusted_rows.is_captured(rows):
            return False
        if self.adjustments.offsets is not self._graphed_offsets:
            return False
        if reported is None:
            return True
        if self._holds_given():
            return False
        asks_ids = self.logprob_token_ids_state.num_token_ids.np[self.pass_rows.slots_np].any()
        return self._reports is not None and not asks_ids

    def _replay_kept(
        self, filtered: np.ndarray | None, reported: np.ndarray | None
    ) -> LogprobsTensors | None:
        """Look again at rows that ask for it, a canvas of them at a time.

        Args:
            filtered: [num_filtered], int64, ascending: rows with filters.
            reported: [num_reported], int64, ascending: rows with log-probabilities.
        """
        for index in self._canvases_of(filtered):
            self.filtered_rows(index)
        if reported is None or self._reports is None:
            return None
        n = self.pass_rows.num_rows
        ids, logprobs, ranks = (values[:n] for values in _tensors(self._reports))
        ids.zero_()
        logprobs.fill_(float("-inf"))
        ranks.zero_()
        for index in self._canvases_of(reported):
            self.reported_rows(index)
        # Of the others there is nothing, and some want fewer.
        num_top = self.sampling_states.num_logprobs[self.pass_rows.slots_np].max()
        num_columns = 1 + max(int(num_top), 0)
        return LogprobsTensors(ids[:, :num_columns], logprobs[:, :num_columns], ranks)

    def _canvases_of(self, index: np.ndarray | None) -> Sequence[Tensor]:
        """``index`` on the device, in parts of a canvas's length, the last one filled up."""
        if index is None:
            return []
        C = self.slots.canvas_length
        parts = np.resize(index[-1:], (-(-len(index) // C), C))
        parts.reshape(-1)[: len(index)] = index
        return list(async_tensor_h2d(parts, device=self.slots.device))

    def _row_requests(
        self,
        num_rows: int,
        asked: Adjusting | None = None,
        filtered: np.ndarray | None = None,
        reported: np.ndarray | None = None,
    ) -> RowRequests:
        """What is asked of the rows of the pass.

        Args:
            num_rows: All of them.
            asked: Of their logits.
            filtered: [num_filtered], int64, ascending: rows with filters.
            reported: [num_reported], int64, ascending: rows with log-probabilities.
        """
        rows = slice(num_rows)
        adjustments = None
        if asked is not None:
            slot, _ = self._places(rows)
            adjustments = self.adjustments.bind(asked, rows, slot, self._drawn_at(rows))
        return RowRequests(
            self._draws(rows),
            adjustments,
            None if filtered is None else self._filters_of(filtered),
            None if reported is None else self._reports_of(reported, adjustments),
            self.num_choices,
        )

    def _places(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        """Two int64 tensors [num_rows]: the slot and the position of rows of the pass."""
        return self.pass_rows.slot[rows], self.pass_rows.position[rows]

    def _drawn_at(self, rows: slice | Tensor) -> Tensor:
        """[num_rows], int64: where in its sequence the token stands that each row draws."""
        return self.spec.layout.drawn_at(_RowsOfPass(self, rows))

    def _draws(self, rows: slice | Tensor) -> RowDraws:
        """Temperatures of rows, and the keys of their draws."""
        slots = self.slots
        slot, position = self._places(rows)
        judged, drawn = temperatures(slots, self._requested)
        draws = RowDraws(
            judged[slot],
            drawn[slot],
            self.pass_rows.of_slots.seed[slot],
            slots.canvas_idx[slot],
            slots.step[slot],
            position.to(torch.int32),
        )
        return self.spec.layout.draws(draws, _RowsOfPass(self, rows))

    def _sample(self, rows: Tensor, requests: RowRequests) -> RowResults:
        """Sample the rows and scatter their statistics to (slot, position)."""
        every = slice(len(rows))
        slot, position = self._places(every)
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
            if requests.adjustments is not None:
                restart = self.constraints.restart(every)
                soft_embeds = torch.where(restart[:, None], 0.0, soft_embeds)
            self.store_soft_embeds(soft_embeds, slot, position)
        return results

    def _decide(self) -> StepOutput:
        """What becomes of every canvas."""
        return self.canvas_step(self._statistics, self.pass_rows.of_slots)

    def _exchange_logprobs(
        self, computed: LogprobsTensors, step: StepOutput, committed: Tensor, pinned: Tensor
    ) -> LogprobsTensors:
        """Log-probabilities that each request may emit now.

        A token is reported as it was when it was revealed, or rewritten; without a mask as it is in
        the last step, but for a request that asks which step decided it.

        Args:
            computed: Of the rows of this pass.
            step: What became of the canvases.
            committed: [R], bool, canvases that this pass committed.
            pinned: [R, C], bool, positions that were pinned in the pass.
        """
        places, layout = self.pass_rows, self.spec.layout
        slot, position = self._places(slice(places.num_rows))
        row = torch.arange(len(slot), device=slot.device)
        is_decided = ~step.decided[slot, position]
        is_seed = places.of_slots.seeding[slot]
        if self.spec.mask_token_id is None:
            is_decided = is_decided & self.slots.maps_steps[slot]
        else:
            unwritten = step.decided_step[slot, position] == 0
            is_given = layout.is_given(unwritten, position, pinned[slot, position])
            is_decided = is_decided & ~is_given & ~is_seed
        was_reported = layout.was_reported(position, is_seed, is_decided | committed[slot])

        num_rows = np.diff(places.starts)
        seeding = places.seeding
        if seeding is None:
            seeding = np.zeros(len(num_rows), dtype=bool)
        canvas_rows = async_tensor_h2d(
            np.flatnonzero(~np.repeat(seeding, num_rows)), device=slot.device
        )
        # The known tokens that a canvas begins with are not emitted.
        emitted = (canvas_rows + step.num_given[slot[canvas_rows]]).clamp(max=len(slot) - 1)
        starts = np.concatenate([[0], np.cumsum(num_rows * ~seeding)])
        told = _rows_of_report(computed, layout.reporting_row(row, position))
        output = self._logprobs.exchange(told, slot, position, was_reported, emitted, starts)

        has_canvas = (num_rows > 0) & ~seeding
        first, count = async_tensor_h2d(
            np.stack([places.starts[:-1][has_canvas], num_rows[has_canvas]]), device=slot.device
        )
        owner = slot[first]
        seed_row = layout.seed_row(first, count, step.num_finished[owner])
        if seed_row is not None:
            self._logprobs.begin(computed, seed_row, owner, committed[owner])
        return output

    def _rows_with_filters(self) -> np.ndarray | None:
        """[n], int64, ascending: rows whose requests have top-k, top-p or min-p; ``None`` for none."""
        return self._rows_of(np.logical_or.reduce(self._used_filters()))

    def _used_filters(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[num_reqs], bool: whether each request of the pass has top-k, top-p and min-p."""
        states, slots_np = self.sampling_states, self.pass_rows.slots_np
        return (
            states.top_k.np[slots_np] != self.vocab_size,
            states.top_p.np[slots_np] != 1.0,
            states.min_p.np[slots_np] != 0.0,
        )

    def _filters_of(self, index: np.ndarray) -> FilteredRows:
        """Of rows with filters: [n], int64."""
        slot = self._slots_of(index)
        filters = (
            values[slot] if use.any() else None
            for values, use in zip(self._filters, self._used_filters(), strict=True)
            if values is not None
        )
        return FilteredRows(index, CandidateFilters(*filters))

    def _rows_with_reports(self) -> np.ndarray | None:
        """[n], int64, ascending: rows whose requests want log-probabilities; ``None`` for none."""
        slots_np = self.pass_rows.slots_np
        num_ids = self.logprob_token_ids_state.num_token_ids.np[slots_np]
        return self._rows_of((self.sampling_states.num_logprobs[slots_np] >= 0) | (num_ids > 0))

    def _reports_of(self, index: np.ndarray, adjustments: LogitAdjustments | None) -> ReportedRows:
        """Of rows with log-probabilities.

        Args:
            index: [n], int64: which they are.
            adjustments: Of all rows.
        """
        ids, slots_np = self.logprob_token_ids_state, self.pass_rows.slots_np
        slot = self._slots_of(index)
        held = None
        if self._holds_given():
            on_device = async_tensor_h2d(index, device=slot.device)
            held = self.slots.canvas[slot, self.pass_rows.position[on_device]]
        num_top = max(int(self.sampling_states.num_logprobs[slots_np].max()), 0)
        token_ids = ids.token_ids.gpu[slot, : ids.max_num_token_ids(slots_np)].long()
        if self.reports_raw:
            adjustments = None
            if self.adjustments.has_readable(slots_np):
                adjustments = self.adjustments.bind_readable(slot)
        elif adjustments is not None:
            adjustments = adjustments.rows(async_tensor_h2d(index, device=slot.device))
        return ReportedRows(
            index,
            self._report_request(num_top, token_ids, ids.num_token_ids.gpu[slot], held),
            adjustments,
            self._reported_temperature(slot),
        )

    def _report_request(
        self, num_top: int, token_ids: Tensor, num_token_ids: Tensor, held: Tensor | None = None
    ) -> LogprobsRequest:
        return LogprobsRequest(
            num_top=num_top,
            token_ids=token_ids,
            num_token_ids=num_token_ids,
            as_logits=self.logits_mode,
            # What a masked model commits is what it drew.
            of_drawn=self.spec.mask_token_id is not None,
            held=held,
        )

    def _holds_given(self) -> bool:
        """Whether canvases of the pass may hold tokens that their requests brought.

        A masked model emits them as they are. Without a mask the likeliest tokens are emitted.
        """
        is_masked = self.spec.mask_token_id is not None
        return is_masked and bool(self.slots.brings_canvas_np[self.pass_rows.slots_np].any())

    def _reported_temperature(self, slot: Tensor) -> Tensor:
        """[n], float32: what reported logits are divided by.

        A read-only canvas reports the model's own distribution, at temperature 1.
        """
        judged, _ = temperatures(self.slots, self._requested)
        is_plain = self.slots.read_only
        if self.spec.layout.reports_unscaled(self.reports_raw):
            is_plain = torch.ones_like(is_plain)
        return torch.where(is_plain[slot], 1.0, judged[slot])

    def _rows_of(self, chosen: np.ndarray) -> np.ndarray | None:
        """[n], int64, ascending: rows of some requests of the pass.

        Args:
            chosen: [num_reqs], bool.

        Returns:
            ``None`` where there are no such requests or they are still at their prompts.
        """
        if not chosen.any():
            return None
        index = np.flatnonzero(np.repeat(chosen, np.diff(self.pass_rows.starts)))
        return index if index.size > 0 else None

    def _slots_of(self, index: np.ndarray) -> Tensor:
        """[n], int64, on the device: of some rows."""
        slots = np.repeat(self.pass_rows.slots_np, np.diff(self.pass_rows.starts))[index]
        return async_tensor_h2d(slots, device=self.slots.device)

    def _engine_output(self, output: StepOutput, logprobs: LogprobsTensors | None) -> SamplerOutput:
        self.views.keep(output)
        told = self.pass_rows.for_engine(output)
        return SamplerOutput(
            sampled_token_ids=told.tokens,
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=told.num_sampled,
            num_rejected=told.num_rejected,
        )

    def _no_reports(self, num_rows: int, num_columns: int) -> LogprobsTensors:
        """Room for the log-probabilities of rows."""
        device = self.slots.device
        return LogprobsTensors(
            torch.zeros(num_rows, num_columns, dtype=torch.int64, device=device),
            torch.zeros(num_rows, num_columns, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
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


def _tensors(report: LogprobsTensors) -> tuple[Tensor, Tensor, Tensor]:
    return report.logprob_token_ids, report.logprobs, report.selected_token_ranks


def _rows_of_report(report: LogprobsTensors, row: Tensor) -> LogprobsTensors:
    """Some rows of a report, in another order."""
    return LogprobsTensors(*(values[row] for values in _tensors(report)))


class _RowsOfPass:
    """Rows of a pass as a layout looks at them; see :class:`vllm_diffusion.layouts.SampledRows`."""

    def __init__(self, sampler: DiffusionSampler, rows: slice | Tensor) -> None:
        self._sampler = sampler
        self._rows = rows
        self._slot = sampler.pass_rows.slot[rows]

    @property
    def committed(self) -> Tensor:
        return (self._sampler.slots.phase == int(Phase.COMMITTING))[self._slot]

    @property
    def seeding(self) -> Tensor:
        return self._sampler.pass_rows.of_slots.seeding[self._slot]

    @property
    def at(self) -> Tensor:
        num_computed: Tensor = self._sampler.req_states.num_computed_tokens.gpu
        return num_computed[self._slot] + self._sampler.pass_rows.offset[self._rows]
