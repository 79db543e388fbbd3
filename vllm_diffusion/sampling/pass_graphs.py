"""Functions that a pass launches, each replayed as a graph for the shapes that were captured.

A pass in which no request uses more than temperatures and seeds is one function, the plain step. Any
other pass is sampled in parts, and then decided: its adjusted rows; of these the rows with filters,
a canvas's length of them at a time, which need the statistics of the whole row; and the rows with
log-probabilities, which need the tokens. Their statistics are scattered to the positions of their
canvases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from attention_kernels.vocab_statistics import RowLogits
from vllm_diffusion.canvas.cuda_graphs import Capture, GraphedFunction
from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.canvas.slots import CanvasSlots
from vllm_diffusion.canvas.step import CanvasStep, StepOutput
from vllm_diffusion.sampling.kept_rows import RowSettings
from vllm_diffusion.sampling.logprobs import IMPOSSIBLE, row_logprobs
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.pass_settings import PassSettings, SelectedRows, UsedSettings
from vllm_diffusion.sampling.row_adjustments import ConstraintTensors
from vllm_diffusion.sampling.vocabulary_stream import (
    RowResults,
    draw_filtered,
    no_logprobs,
    rows_in_float32,
    sample_rows,
)

# (soft embeddings [num_rows, hidden_size] float32, slot [num_rows], position [num_rows]) -> kept for
# self-conditioning.
StoreSoftEmbeds = Callable[[Tensor, Tensor, Tensor], None]


class RowStatistics:
    """Statistics of a pass, which the decision reads.

    Attributes:
        head: The projection onto the vocabulary.
        of_slots: Statistics by slot and position.
    """

    def __init__(
        self,
        slots: CanvasSlots,
        pass_rows: PassRows,
        head: OutputHead,
        constraints: ConstraintTensors,
        store_soft_embeds: StoreSoftEmbeds,
    ) -> None:
        """Allocate for all slots.

        Args:
            slots: The canvases.
            pass_rows: The rows of the pass.
            head: The projection onto the vocabulary.
            constraints: Constraints of the pass.
            store_soft_embeds: Called if ``head`` has an embedding.
        """
        self.head = head
        self.of_slots = slots.spec.statistics(slots.num_slots, slots.device)
        self._pass_rows = pass_rows
        self._vocab_size = slots.vocab_size
        self._constraints = constraints
        self._store_soft_embeds = store_soft_embeds

    def sample(self, rows: Tensor, requests: RowSettings) -> RowResults:
        """Sample the rows of the pass and scatter their statistics to (slot, position).

        Args:
            rows: [num_rows, hidden_size].
            requests: Settings of the rows.
        """
        every = slice(len(rows))
        slot, position = self._pass_rows.slot[every], self._pass_rows.position[every]
        results = sample_rows(self.head, rows, requests, self._vocab_size)
        statistics = self.of_slots
        statistics.argmax[slot, position] = results.argmax
        statistics.candidate[slot, position] = results.candidate
        statistics.entropy[slot, position] = results.entropy
        statistics.drawn_confidence[slot, position] = results.drawn_confidence
        if statistics.confidence is not None:
            statistics.confidence[slot, position] = results.confidence
        if statistics.choices is not None and results.choices is not None:
            statistics.choices[slot, position] = results.choices
        if results.soft_embeds is not None:
            soft_embeds = results.soft_embeds
            if requests.adjustments is not None:
                restart = self._constraints.restart(every)
                soft_embeds = torch.where(restart[:, None], 0.0, soft_embeds)
            self._store_soft_embeds(soft_embeds, slot, position)
        return results


# Canvases of the largest pass with settings that has a graph of its adjusted rows.
MOST_ADJUSTED_CANVASES = 8
# Log-probabilities that graphs report; a server that allows more has none of them.
MAX_GRAPHED_LOGPROBS = 32


class PassGraphs:
    """Launches of a pass: :attr:`plain_step`, or :meth:`sample` and then :attr:`decide`.

    Attributes:
        plain_step: ([num_rows, hidden_size] rows) -> :class:`StepOutput`: a pass in which no request
            uses more than temperatures and seeds.
        adjusted_rows: ([num_rows, hidden_size] rows): statistics of a pass with any adjustments.
        filtered_rows: ([n] int64 index): new candidates of rows with filters. The same row may come
            again.
        reported_rows: ([n] int64 index): log-probabilities of rows. The same row may come again.
        decide: () -> :class:`StepOutput`: what becomes of every canvas.
    """

    def __init__(
        self,
        pass_rows: PassRows,
        settings: PassSettings,
        statistics: RowStatistics,
        canvas_step: CanvasStep,
        max_logprobs: int,
    ) -> None:
        """Wrap the functions of a pass; nothing is captured yet.

        Args:
            pass_rows: The rows of the pass.
            settings: Their settings.
            statistics: Their statistics.
            canvas_step: Decides from the statistics.
            max_logprobs: Log-probabilities that a request may ask for; -1 for those of all tokens.
        """
        self._pass_rows = pass_rows
        self._settings = settings
        self._statistics = statistics
        self._canvas_step = canvas_step
        self._max_logprobs = max_logprobs
        self.plain_step = GraphedFunction(self._plain_step)
        self.adjusted_rows = GraphedFunction(self._adjusted_rows)
        self.filtered_rows = GraphedFunction(self._filtered_rows)
        self.reported_rows = GraphedFunction(self._reported_rows)
        self.decide = GraphedFunction(self._decide)
        # Hidden rows that graphs read, and the reports that they write, where there are any.
        self._hidden: Tensor | None = None
        self._reports: LogprobsTensors | None = None

    def select_rows(self, hidden_states: Tensor) -> Tensor:
        """[num_rows, hidden_size]: the hidden rows that are sampled, where graphs read them.

        Args:
            hidden_states: [num_tokens, hidden_size], of the pass.
        """
        n, held = self._pass_rows.num_rows, self._hidden
        out = held[:n] if held is not None and n <= len(held) else None
        return torch.index_select(hidden_states, 0, self._pass_rows.hidden_index[:n], out=out)

    def sample(self, rows: Tensor, used: UsedSettings) -> LogprobsTensors | None:
        """Take the statistics of a pass with settings.

        Args:
            rows: [num_rows, hidden_size], from :meth:`select_rows`.
            used: Settings that the pass uses.

        Returns:
            Log-probabilities of each row's token; ``None`` if no request asks.
        """
        if self.has_parts(rows, used):
            self.adjusted_rows(rows)
            return self._look_again(used)
        return self._statistics.sample(rows, self._settings.requests(len(rows), used)).logprobs

    def has_parts(self, rows: Tensor, used: UsedSettings) -> bool:
        """Report whether the parts of a pass with settings are captured.

        Args:
            rows: [num_rows, hidden_size].
            used: Settings that the pass uses.
        """
        if not self.adjusted_rows.is_captured(rows):
            return False
        if used.reported is None:
            return True
        return self._reports is not None and not self._settings.names_logprob_ids()

    def capture(self, capture: Capture, canvas_counts: range, hidden: Tensor) -> None:
        """Capture steps of some numbers of whole canvases, and the parts of adjusted ones.

        The pass has no rows and no constraints meanwhile, so a capture changes no canvas.

        Args:
            capture: Makes a graph of a call.
            canvas_counts: The numbers, the largest first.
            hidden: [most canvases * canvas_length, hidden_size], rows that graphs read from.
        """
        C = self._length
        self._hidden = hidden
        for n in canvas_counts:
            self.plain_step.capture(capture, hidden[: n * C])
        for n in sorted({min(n, MOST_ADJUSTED_CANVASES) for n in canvas_counts}, reverse=True):
            self.adjusted_rows.capture(capture, hidden[: n * C])
        some = torch.zeros(C, dtype=torch.int64, device=hidden.device)
        self.filtered_rows.capture(capture, some)
        if 0 <= self._max_logprobs <= MAX_GRAPHED_LOGPROBS:
            self._reports = no_logprobs(len(hidden), 1 + self._max_logprobs, hidden.device)
            self.reported_rows.capture(capture, some.clone())
        self.decide.capture(capture)

    def drop(self) -> None:
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

    # The functions.

    def _plain_step(self, rows: Tensor) -> StepOutput:
        self._statistics.sample(rows, self._settings.requests(len(rows)))
        return self._decide()

    def _adjusted_rows(self, rows: Tensor) -> None:
        used = UsedSettings(adjusted=self._settings.adjustments.all_used())
        self._statistics.sample(rows, self._settings.requests(len(rows), used))

    def _filtered_rows(self, index: Tensor) -> None:
        some, settings = self._settings.select(index), self._settings
        head, statistics = self._statistics.head, self._statistics.of_slots
        logits = self._logits_again(some, index)
        statistics.candidate[some.slot, some.position], drawn_confidence = draw_filtered(
            head,
            logits.projected,
            settings.draws(some),
            logits.adjustments,
            settings.filters.rows(some.slot),
            self._pass_rows.slots.vocab_size,
        )
        statistics.drawn_confidence[some.slot, some.position] = drawn_confidence

    def _reported_rows(self, index: Tensor) -> None:
        assert self._reports is not None
        some, settings = self._settings.select(index), self._settings
        head, statistics = self._statistics.head, self._statistics.of_slots
        logits = self._logits_again(some, index)
        assert logits.adjustments is not None
        num_top = self._reports.logprobs.shape[1] - 1
        no_ids, num_ids = index[:, None][:, :0], torch.zeros_like(some.slot)
        request = settings.logprobs_request(num_top, no_ids, num_ids)
        of_tokens = statistics.candidate if request.of_drawn else statistics.argmax
        adjustments = settings.reported_adjustments_of(some, logits.adjustments)
        computed = row_logprobs(
            logits._replace(adjustments=adjustments),
            settings.reported_temperature(some.slot),
            of_tokens[some.slot, some.position],
            request,
            head,
            rows_in_float32(head, len(index)),
        )
        held = self._reports
        held.logprob_token_ids[index] = computed.logprob_token_ids.to(held.logprob_token_ids.dtype)
        held.logprobs[index] = computed.logprobs.to(held.logprobs.dtype)
        ranks = held.selected_token_ranks
        ranks[index] = computed.selected_token_ranks.to(ranks.dtype)

    def _decide(self) -> StepOutput:
        return self._canvas_step(self._statistics.of_slots, self._pass_rows.of_slots)

    # Rows that are looked at again.

    def _logits_again(self, some: SelectedRows, index: Tensor) -> RowLogits:
        """Project rows of the pass again, with all adjustments that a request may have.

        Args:
            some: The rows.
            index: [n], int64, which rows of the pass they are.
        """
        assert self._hidden is not None
        used = self._settings.adjustments.all_used()
        adjustments, head = self._settings.adjustments_of(some, used), self._statistics.head
        projected = head.project(self._hidden[index], slice(0, len(head.weight)))
        return RowLogits(projected, head.first_id, head.softcap, adjustments)

    def _look_again(self, used: UsedSettings) -> LogprobsTensors | None:
        """Replay the graphs of rows with filters or log-probabilities; return the latter."""
        for index in self._canvases_of(used.filtered):
            self.filtered_rows(index)
        if used.reported is None or self._reports is None:
            return None
        n, reports = self._pass_rows.num_rows, self._reports
        ids, logprobs = reports.logprob_token_ids[:n], reports.logprobs[:n]
        ranks = reports.selected_token_ranks[:n]
        # The other rows report nothing.
        ids.zero_()
        logprobs.fill_(IMPOSSIBLE)
        ranks.zero_()
        for index in self._canvases_of(used.reported):
            self.reported_rows(index)
        # Some requests want fewer than the graph reports.
        num_columns = 1 + self._settings.num_top()
        return LogprobsTensors(ids[:, :num_columns], logprobs[:, :num_columns], ranks)

    def _canvases_of(self, index: np.ndarray | None) -> Sequence[Tensor]:
        """Cut rows into parts of a canvas's length, on the device; the last row fills the last part.

        Args:
            index: [n], int64, which rows of the pass; ``None`` for none.
        """
        if index is None:
            return []
        parts = np.resize(index[-1:], (-(-len(index) // self._length), self._length))
        parts.reshape(-1)[: len(index)] = index
        return list(async_tensor_h2d(parts, device=self._pass_rows.index.device))

    @property
    def _length(self) -> int:
        """C, positions of a canvas."""
        return self._statistics.of_slots.argmax.shape[1]
