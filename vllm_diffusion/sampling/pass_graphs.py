"""Functions that a pass launches, each replayed as a graph for the shapes that were captured.

A pass in which no request uses more than temperatures and seeds, and some canvas may take another step, is one
function, the plain step. Any other pass is sampled in parts, and then decided: its adjusted rows; of these the rows with
filters, a canvas's length of them at a time, or 256, which need the statistics of the whole row; and the rows with
log-probabilities, which need the tokens. The last two project their rows again. Their statistics are
scattered to the positions of their canvases. A part without a graph is called, and then does no more
than the pass uses. The adjusted rows are also called where no canvas takes another step, or where every request is
held to a few ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from attention_kernels.vocab_statistics import LogitAdjustments, RowDraws, RowLogits
from vllm_diffusion.canvas.cuda_graphs import Capture, GraphedFunction, compiled_by_rows
from vllm_diffusion.canvas.pass_rows import PassRows, rows_of
from vllm_diffusion.canvas.step import CanvasStep, StepOutput
from vllm_diffusion.decoding.canvas_spec import PositionStatistics
from vllm_diffusion.sampling.kept_rows import draw_filtered
from vllm_diffusion.sampling.logprobs import IMPOSSIBLE, no_logprobs, row_logprobs, write_rows
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.pass_settings import PassSettings, SelectedRows, UsedSettings
from vllm_diffusion.sampling.row_adjustments import ConstraintTensors
from vllm_diffusion.sampling.vocabulary_stream import sample_rows

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
        pass_rows: PassRows,
        head: OutputHead,
        constraints: ConstraintTensors,
        store_soft_embeds: StoreSoftEmbeds,
    ) -> None:
        """Allocate for all slots.

        Args:
            pass_rows: The rows of the pass.
            head: The projection onto the vocabulary.
            constraints: Constraints of the pass.
            store_soft_embeds: Called if ``head`` has an embedding.
        """
        slots = pass_rows.slots
        self.head = head
        self.of_slots = slots.spec.statistics(slots.num_slots, slots.device)
        self._named_tokens = slots.spec.rule.named_tokens
        self._constraints = constraints
        self._store_soft_embeds = store_soft_embeds
        self._write = compiled_by_rows(self._write_to_slots, pass_rows.compile_backend)

    def sample(
        self,
        rows: Tensor,
        selected: SelectedRows,
        draws: RowDraws,
        adjustments: LogitAdjustments | None,
        used: UsedSettings,
    ) -> None:
        """Sample the rows of the pass and scatter their statistics to (slot, position).

        Args:
            rows: [num_rows, hidden_size].
            selected: Which they are.
            draws: Their temperatures and noise keys.
            adjustments: Adjustments of their logits; ``None`` if there are none.
            used: Settings that the pass uses.
        """
        slot, position, statistics = selected.slot, selected.position, self.of_slots
        # Without an embedding there is no second product.
        head = self.head if used.has_next_step else replace(self.head, embedding=None)
        results = sample_rows(
            head,
            rows,
            draws,
            adjustments,
            statistics.num_likeliest,
            named_tokens=self._named_tokens,
            allowed_ids=used.allowed_ids,
        )
        soft_embeds = results.soft_embeds
        self._write(slot, position, results._replace(soft_embeds=None))
        if soft_embeds is not None:
            if adjustments is not None:
                restart = self._constraints.restart(selected.rows)
                soft_embeds = torch.where(restart[:, None], 0.0, soft_embeds)
            self._store_soft_embeds(soft_embeds, slot, position)

    def _write_to_slots(self, slot: Tensor, position: Tensor, values: PositionStatistics) -> None:
        self.of_slots.write(slot, position, values)


# Canvases of the largest pass with settings that has a graph of its adjusted rows.
MOST_ADJUSTED_CANVASES = 8
# Rows whose logits are held at once: those of DiffusionGemma's canvas.
MOST_ROWS_AGAIN = 256
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
        # A graph projects onto all ids, and for a next step.
        adjusted_rows = self._adjusted_rows if used.needs_less else self.adjusted_rows
        adjusted_rows(rows, used=used)
        # Graphs look at rows where they were captured.
        is_held = self._hidden is not None and len(rows) <= len(self._hidden)
        filtered_rows = self.filtered_rows if is_held else self._filtered_rows
        for index in self._canvases_of(used.filtered, is_held):
            filtered_rows(index, hidden=rows, used=used)
        if used.reported is None:
            return None
        if used.reports_pinned:
            # What is reported of a position is the token that the answer has there.
            slots, argmax = self._pass_rows.slots, self._statistics.of_slots.argmax
            torch.where(slots.pinned, slots.canvas, argmax, out=argmax)
        return self._report(rows, used, is_held)

    def capture(self, capture: Capture, canvas_counts: range, hidden: Tensor) -> None:
        """Capture steps of some numbers of whole canvases, and the parts of adjusted ones.

        The pass has no rows and no constraints meanwhile, so a capture changes no canvas.

        Args:
            capture: Makes a graph of a call.
            canvas_counts: The numbers, the largest first.
            hidden: [most canvases * canvas_length, hidden_size], rows that graphs read from.
        """
        C, everything = self._length, self._settings.all_used(self._max_logprobs)
        self._hidden = hidden
        for n in canvas_counts:
            self.plain_step.capture(capture, hidden[: n * C])
        for n in sorted({min(n, MOST_ADJUSTED_CANVASES) for n in canvas_counts}, reverse=True):
            self.adjusted_rows.capture(capture, hidden[: n * C], used=everything)
        some = torch.zeros(self.num_again, dtype=torch.int64, device=hidden.device)
        self.filtered_rows.capture(capture, some, hidden=hidden, used=everything)
        if 0 <= self._max_logprobs <= MAX_GRAPHED_LOGPROBS:
            self._reports = no_logprobs(len(hidden), 1 + self._max_logprobs, hidden.device)
            self.reported_rows.capture(
                capture, some.clone(), hidden=hidden, used=everything, reports=self._reports
            )
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
        self._adjusted_rows(rows, UsedSettings())
        return self._decide()

    def _adjusted_rows(self, rows: Tensor, used: UsedSettings) -> None:
        settings = self._settings
        some = settings.select(slice(len(rows)))
        adjustments = settings.adjustments_of(some, used)
        self._statistics.sample(rows, some, settings.draws(some), adjustments, used)

    def _filtered_rows(self, index: Tensor, hidden: Tensor, used: UsedSettings) -> None:
        some, statistics = self._settings.select(index), self._statistics.of_slots
        slots = self._pass_rows.slots
        drawn = draw_filtered(
            self._statistics.head,
            self._logits_again(some, hidden[index], used),
            self._settings.draws(some),
            rows_of(used.filters, some.slot),
            slots.vocab_size,
            judges_kept=slots.spec.rule.judges_filtered,
        )
        statistics.candidate[some.slot, some.position] = drawn.candidate
        statistics.drawn_confidence[some.slot, some.position] = drawn.share
        if drawn.entropy is not None and drawn.margin is not None:
            assert statistics.margin is not None
            statistics.entropy[some.slot, some.position] = drawn.entropy
            statistics.margin[some.slot, some.position] = drawn.margin

    def _reported_rows(
        self, index: Tensor, hidden: Tensor, used: UsedSettings, reports: LogprobsTensors
    ) -> None:
        some, settings = self._settings.select(index), self._settings
        statistics = self._statistics.of_slots
        logits = self._logits_again(some, hidden[index], used)
        adjustments = settings.reported_adjustments_of(some, used, logits.adjustments)
        request = settings.logprobs_request(some.slot, used)
        of_tokens = statistics.candidate if request.of_drawn else statistics.argmax
        if (verified := self._pass_rows.slots.verified) is not None:
            of_tokens = torch.where(verified[:, None], statistics.candidate, of_tokens)
        computed = row_logprobs(
            logits._replace(adjustments=adjustments),
            settings.reported_temperature(some.slot),
            of_tokens[some.slot, some.position],
            request,
            self._statistics.head,
        )
        write_rows(reports, index, computed)

    def _decide(self) -> StepOutput:
        return self._canvas_step(self._statistics.of_slots, self._pass_rows.of_slots)

    # Rows that are looked at again.

    def _logits_again(self, some: SelectedRows, rows: Tensor, used: UsedSettings) -> RowLogits:
        """Project rows of the pass again, onto all ids of this rank that some row may draw or report.

        Args:
            some: Which they are.
            rows: [n, hidden_size].
            used: Settings that the pass uses.
        """
        head = self._statistics.head
        adjustments = self._settings.adjustments_of(some, used)
        projected = head.project_all(rows, used.allowed_ids)
        return RowLogits(projected, head.first_id, head.softcap, adjustments)

    def _report(self, rows: Tensor, used: UsedSettings, is_held: bool) -> LogprobsTensors:
        """Log-probabilities of all rows; a row whose request wants none reports nothing.

        Args:
            rows: [num_rows, hidden_size].
            used: Settings that the pass uses.
            is_held: Graphs read the rows.
        """
        num_columns = 1 + max(used.num_top, used.num_named)
        reported_rows: Callable[..., None] = self.reported_rows
        if self._reports is not None and is_held and used.num_named == 0:
            reports = rows_of(self._reports, slice(len(rows)))
            reports.logprob_token_ids.zero_()
            reports.logprobs.fill_(IMPOSSIBLE)
            reports.selected_token_ranks.zero_()
        else:
            reported_rows = self._reported_rows
            reports = no_logprobs(len(rows), num_columns, rows.device)
        for index in self._canvases_of(used.reported, is_held):
            reported_rows(index, hidden=rows, used=used, reports=reports)
        # Some requests want fewer than the graph reports.
        return reports._replace(
            logprob_token_ids=reports.logprob_token_ids[:, :num_columns],
            logprobs=reports.logprobs[:, :num_columns],
        )

    def _canvases_of(self, index: np.ndarray | None, is_graphed: bool) -> Sequence[Tensor]:
        """Cut rows into parts of a canvas's length, on the device.

        Args:
            index: [n], int64, which rows of the pass; ``None`` for none.
            is_graphed: Fill up the last part with the last row: a graph has one shape.
        """
        if index is None:
            return []
        if is_graphed:
            index = np.pad(index, (0, -len(index) % self.num_again), mode="edge")
        return async_tensor_h2d(index, device=self._pass_rows.index.device).split(self.num_again)

    @property
    def num_again(self) -> int:
        """Rows that are looked at again at once: a canvas's, but where it holds a whole sequence."""
        return min(self._length, MOST_ROWS_AGAIN)

    @property
    def _length(self) -> int:
        """C, positions of a canvas."""
        return self._statistics.of_slots.argmax.shape[1]
