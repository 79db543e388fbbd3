"""Sampling settings of requests, by slot, and what a pass makes of them for some of its rows."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_kernels.vocab_statistics import LogitAdjustments, RowDraws
from vllm_diffusion.canvas.compiled import compiled_by_rows
from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.canvas.slots import Phase
from vllm_diffusion.canvas.step import temperatures
from vllm_diffusion.decoding.layouts import CanvasLayout, FirstRows
from vllm_diffusion.decoding.ways import Way
from vllm_diffusion.requests.arguments import arguments_of
from vllm_diffusion.sampling.candidate_filters import CandidateFilters
from vllm_diffusion.sampling.logprobs import LogprobsRequest
from vllm_diffusion.sampling.row_adjustments import RowAdjustments
from vllm_diffusion.sampling.used_settings import UsedSettings


class SelectedRows:
    """Some of the sampled rows of the pass.

    Attributes:
        rows: Which of the sampled rows they are: the first ones, or [n], int64.
        slot: [n], int64, their slots.
        position: [n], int64, their positions in their canvases.
    """

    def __init__(self, rows: slice | Tensor, pass_rows: PassRows, num_computed: Tensor) -> None:
        """Select rows.

        Args:
            rows: Which of the sampled rows.
            pass_rows: The rows of the pass.
            num_computed: [R], int32, tokens of each slot before the pass.
        """
        self.rows = rows
        self.slot = pass_rows.slot[rows]
        self.position = pass_rows.position[rows]
        self._slots = pass_rows.slots
        self._pass_rows = pass_rows
        self._num_computed = num_computed

    @property
    def first_rows(self) -> FirstRows:
        """Which of the rows draw the first token of the next canvas."""
        return FirstRows(
            lambda: self._slots.draws_next_first[self.slot],
            lambda: self._pass_rows.of_slots.last_known[self.slot],
        )

    def drawn_at(self) -> Tensor:
        """[n], int64: position in its sequence of the token that each row draws."""
        way = self._slots.way
        return way.choose(lambda way: way.layout, self.drawn_at_in, self.slot)

    def drawn_at_in(self, layout: CanvasLayout) -> Tensor:
        """[n], int64: the same if canvases are of a layout."""
        at = self._num_computed[self.slot] + self._pass_rows.offset[self.rows]
        if not layout.draws_first_token:
            return at
        return at + layout.shift(self.position, self.first_rows)


class PassSettings:
    """Settings of the requests, by slot and for the rows that :meth:`PassRows.lay_out` laid out.

    vLLM's own states take them from a request, and rotate among several buffers of the host. Graphs
    need fixed addresses, so the values are copied to fixed tensors when a request comes. R is the
    number of slots.

    Attributes:
        states: vLLM's sampling states; the host reads its NumPy side.
        token_ids: vLLM's state of ``logprob_token_ids``.
        temperature: [R], float32, the ``temperature`` of each request.
        filters: [R] each, the filters of each request.
        adjustments: Adjustments of logits by slot.
    """

    def __init__(
        self,
        stock_sampler: Any,
        pass_rows: PassRows,
        adjustments: RowAdjustments,
        self_conditions: bool,
    ) -> None:
        """Allocate for all slots.

        Args:
            stock_sampler: vLLM's sampler.
            pass_rows: The rows of the pass; the seeds of requests are written to its ``of_slots``.
            adjustments: Adjustments of logits by slot.
            self_conditions: True if steps read the soft embeddings of the step before.
        """
        slots = pass_rows.slots
        R, device = slots.num_slots, slots.device
        self.states = stock_sampler.sampling_states
        self.token_ids = stock_sampler.logprob_token_ids_state
        self.temperature = torch.ones(R, dtype=torch.float32, device=device)
        self.filters = CandidateFilters(
            torch.full((R,), slots.vocab_size, dtype=torch.int32, device=device),
            torch.ones(R, dtype=torch.float32, device=device),
            torch.zeros(R, dtype=torch.float32, device=device),
        )
        self.adjustments = adjustments
        self._self_conditions = self_conditions
        self._slots = slots
        self._pass_rows = pass_rows
        self._req_states = stock_sampler.req_states
        mode = stock_sampler.logprobs_mode
        self._reports_logits = mode in ("raw_logits", "processed_logits")
        self._reports_raw = mode in ("raw_logits", "raw_logprobs")
        # By slot: its steps need margins.
        self._reads_margin = np.zeros(R, dtype=bool)
        self._is_staged = False
        self._draws = compiled_by_rows(self._draws_of, pass_rows.compile_backend)

    def add_request(self, slot: int, sampling_params: Any) -> None:
        """Stage the settings of ``slot``'s new owner."""
        self._is_staged = True
        states, arguments = self.states, arguments_of(sampling_params)
        states.add_request(slot, sampling_params)
        # At temperature 0 vLLM has no filters, and a rule may judge by them.
        if 0 < arguments.judging_top_k < self._slots.vocab_size:
            states.top_k.np[slot] = arguments.judging_top_k
        if arguments.judging_top_p < 1:
            states.top_p.np[slot] = arguments.judging_top_p
        spec = self._slots.spec
        settings = spec.all_settings(arguments.settings)
        self._reads_margin[slot] = spec.ways[arguments.way].rule.reads_margin(settings)
        self.token_ids.add_request(slot, sampling_params)

    def apply_staged_writes(self) -> None:
        """Copy the settings of new requests to the device, if there are any."""
        if not self._is_staged:
            return
        self._is_staged = False
        states = self.states
        states.apply_staged_writes()
        self.token_ids.apply_staged_writes()
        R = len(self.temperature)
        self._pass_rows.of_slots.seed.copy_(states.seeds.gpu[:R])
        self.temperature.copy_(states.temperature.gpu[:R])
        torch.eq(self.temperature, 0, out=self._pass_rows.of_slots.greedy)
        of_vllm = (states.top_k, states.top_p, states.min_p)
        for held, given in zip(self.filters, of_vllm, strict=True):
            assert held is not None
            held.copy_(given.gpu[:R])

    # What the pass uses, by the host's knowledge.

    def used(self, num_masks: int | None) -> UsedSettings:
        """Find the settings that the rows of the pass use.

        Args:
            num_masks: Masks of the pass's constraints; ``None`` if it has none.
        """
        requests, slots = self._pass_rows.requests, self._pass_rows.requests.slots
        states, num_logprobs = self.states, self.states.num_logprobs[slots]
        has_filter = (
            states.top_k.np[slots] != self._slots.vocab_size,
            states.top_p.np[slots] != 1.0,
            states.min_p.np[slots] != 0.0,
        )
        names_ids = self.token_ids.num_token_ids.np[slots] > 0
        sampled, features = slots[requests.num_rows > 0], self._slots.features
        used = replace(
            self.adjustments.used_by(sampled, num_masks),
            filtered=requests.rows_of(
                np.logical_or.reduce((*has_filter, self._reads_margin[slots]))
            ),
            reported=requests.rows_of((num_logprobs >= 0) | names_ids),
            allowed_ids=features.held_to(sampled.tolist()),
            has_next_step=not (
                self._self_conditions and features.one_step.issuperset(sampled.tolist())
            ),
        )
        if used.reported is None and (read := self._read()) is not None:
            used = replace(used, read=np.flatnonzero(read))
            if used.filtered is not None:
                filtered = used.filtered[read[used.filtered]]
                used = replace(used, filtered=filtered if filtered.size > 0 else None)
        if used.filtered is not None:
            # Without a filter that no request of the pass has.
            of_slots = zip(self.filters, has_filter, strict=True)
            filters = CandidateFilters(*(x if is_used.any() else None for x, is_used in of_slots))
            used = replace(used, filters=filters)
        if used.reported is not None:
            used = replace(
                used,
                num_top=max(int(num_logprobs.max()), 0),
                num_named=self.token_ids.max_num_token_ids(slots),
                reads_some=self.adjustments.has_readable(slots),
                reports_pinned=not features.pinned.isdisjoint(slots.tolist()),
            )
        return used

    def _read(self) -> np.ndarray | None:
        """Which of the pass's rows its step reads, [num_rows], bool, where canvases are the host's
        to read; ``None`` for all.
        """

        def reads_all(way: Way) -> bool:
            # First tokens are drawn, and drafts verified, by rows that hold no mask.
            return way.layout.draws_first_token or way.layout.verifies

        slots, rows = self._slots, self._pass_rows
        if (
            slots.device.type != "cpu"
            or slots.features.viewed
            or all(map(reads_all, slots.spec.ways))
        ):
            return None
        denoising = (slots.phase == int(Phase.DENOISING))[:, None].expand_as(slots.canvas)

        def read_by(way: Way) -> Tensor:
            if reads_all(way):
                return torch.ones_like(denoising)
            read = way.rule.read(slots.canvas, slots.num_given, slots.requested.settings)
            return denoising if read is None else denoising & read

        of_slots = slots.way.choose(lambda way: way, read_by)
        read = of_slots[rows.slot[: rows.num_rows], rows.position[: rows.num_rows]]
        return None if bool(read.all()) else read.numpy()

    def all_used(self, num_top: int) -> UsedSettings:
        """Settings that any pass may use, but for named ids, for a graph that serves each.

        Args:
            num_top: Most likeliest tokens that are reported of a row.
        """
        adjusted = self.adjustments.all_used()
        return replace(adjusted, filters=self.filters, num_top=num_top, reads_some=True)

    # Rows.

    def select(self, rows: slice | Tensor) -> SelectedRows:
        """Select sampled rows.

        Args:
            rows: The first ones, or [n], int64.
        """
        return SelectedRows(rows, self._pass_rows, self._req_states.num_computed_tokens.gpu)

    def draws(self, some: SelectedRows) -> RowDraws:
        """Temperatures of rows, and the keys of their draws."""
        # Uncompiled, since it adds and divides.
        judged, drawn = temperatures(self._slots, self.temperature)
        draws = self._draws(some.slot, some.position, judged=judged, drawn=drawn)

        def of_layout(layout: CanvasLayout) -> RowDraws:
            return layout.draws(draws, some.first_rows, partial(some.drawn_at_in, layout))

        return self._slots.way.choose(lambda way: way.layout, of_layout, some.slot)

    def _draws_of(self, slot: Tensor, position: Tensor, judged: Tensor, drawn: Tensor) -> RowDraws:
        slots = self._slots
        return RowDraws(
            judged[slot],
            drawn[slot],
            self._pass_rows.of_slots.seed[slot],
            slots.canvas_idx[slot],
            slots.step[slot],
            position.to(torch.int32),
        )

    def adjustments_of(self, some: SelectedRows, used: UsedSettings) -> LogitAdjustments | None:
        """Adjustments of the logits of rows; ``None`` if none are used.

        Args:
            some: The rows.
            used: Settings that the pass uses.
        """
        if not used.adjusts:
            return None
        return self.adjustments.bind(used, some.rows, some.slot, some.drawn_at())

    def reported_adjustments_of(
        self, some: SelectedRows, used: UsedSettings, adjustments: LogitAdjustments | None
    ) -> LogitAdjustments | None:
        """Adjustments of the logits that rows report; ``None`` if there are none.

        Args:
            some: The rows.
            used: Settings that the pass uses.
            adjustments: Adjustments of the logits that they draw from.
        """
        if not self._reports_raw:
            return adjustments
        return self.adjustments.bind_readable(some.slot) if used.reads_some else None

    def reported_temperature(self, slot: Tensor) -> Tensor:
        """[n], float32: divisor of reported logits.

        A read-only canvas reports the model's own distribution, at temperature 1; so do the rows
        that verify a draft, as those of an autoregressive server.

        Args:
            slot: [n], int64, of the rows.
        """
        judged, _ = temperatures(self._slots, self.temperature)
        is_plain = self._slots.requested.read_only
        if self._reports_raw:
            verifies = self._slots.way.fact(lambda way: way.layout.verifies)
            is_plain = is_plain | verifies
        return torch.where(is_plain[slot], 1.0, judged[slot])

    def logprobs_request(self, slot: Tensor, used: UsedSettings) -> LogprobsRequest:
        """Describe the log-probabilities that rows report; see :class:`LogprobsRequest`.

        Args:
            slot: [n], int64, of the rows.
            used: Settings that the pass uses.
        """
        # No graph reads vLLM's state, which rotates.
        token_ids, num_token_ids = slot[:, None][:, :0], torch.zeros_like(slot)
        if used.num_named > 0:
            token_ids = self.token_ids.token_ids.gpu[slot, : used.num_named].long()
            num_token_ids = self.token_ids.num_token_ids.gpu[slot]
        return LogprobsRequest(
            num_top=used.num_top,
            token_ids=token_ids,
            num_token_ids=num_token_ids,
            as_logits=self._reports_logits,
        )
