"""Functions that sample a pass: its rows with adjustments, those with filters, those that are
reported, and the decision.

The rows with filters need the statistics of the whole row, and those with log-probabilities the
tokens: both are projected again. Statistics are scattered to the positions of their canvases.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from attention_kernels.vocab_statistics import RowLogits
from vllm_diffusion.canvas.compiled import compiled_by_rows
from vllm_diffusion.canvas.pass_rows import PassRows, rows_of
from vllm_diffusion.canvas.step import CanvasStep, StepOutput
from vllm_diffusion.decoding.rule import PositionStatistics
from vllm_diffusion.sampling.candidate_filters import draw_filtered
from vllm_diffusion.sampling.logprobs import row_logprobs, write_rows
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.pass_settings import PassSettings, SelectedRows
from vllm_diffusion.sampling.row_adjustments import TokenMasks
from vllm_diffusion.sampling.used_settings import UsedSettings
from vllm_diffusion.sampling.vocabulary_stream import sample_rows

# (soft embeddings [num_rows, hidden_size] float32, slot [num_rows], position [num_rows]) -> kept
# for self-conditioning.
StoreSoftEmbeds = Callable[[Tensor, Tensor, Tensor], None]


class SamplingFunctions:
    """Functions of a pass, each of which a graph may hold.

    Attributes:
        settings: Settings of the pass's rows.
        head: The projection onto the vocabulary.
        statistics: Statistics of the pass's rows by slot and position, which the decision reads.
    """

    def __init__(
        self,
        pass_rows: PassRows,
        settings: PassSettings,
        head: OutputHead,
        token_masks: TokenMasks,
        store_soft_embeds: StoreSoftEmbeds,
        canvas_step: CanvasStep,
    ) -> None:
        """Join what the functions read, and allocate statistics of all slots.

        Args:
            pass_rows: The rows of the pass.
            settings: Their settings.
            head: The projection onto the vocabulary.
            token_masks: Tokens that constraints of the pass allow.
            store_soft_embeds: Called if ``head`` has an embedding.
            canvas_step: Decides from the statistics.
        """
        slots = pass_rows.slots
        self.head = head
        self.statistics = slots.spec.statistics(slots.num_slots, slots.device)
        self._pass_rows = pass_rows
        self.settings = settings
        self._named_tokens = slots.spec.named_tokens
        self._token_masks = token_masks
        self._store_soft_embeds = store_soft_embeds
        self._canvas_step = canvas_step
        self._write = compiled_by_rows(self._write_to_slots, pass_rows.compile_backend)

    def plain_step(self, rows: Tensor) -> StepOutput:
        """Sample a pass in which no request uses more than temperatures and seeds, and decide.

        Args:
            rows: [num_rows, hidden_size].
        """
        self.adjusted_rows(rows, UsedSettings())
        return self.decide()

    def adjusted_rows(self, rows: Tensor, used: UsedSettings) -> None:
        """Take the statistics of a pass with any adjustments.

        Args:
            rows: [num_rows, hidden_size].
            used: Settings that the pass uses.
        """
        settings = self.settings
        is_all = used.read is None
        some = settings.select(slice(len(rows)) if is_all else torch.from_numpy(used.read))
        adjustments = settings.adjustments_of(some, used)
        draws = settings.draws(some)
        if used.filtered is not None and not rows.is_cuda:
            # What they draw is drawn again from what their filter keeps: noise here is for nothing.
            again = (
                used.filtered if used.read is None else np.searchsorted(used.read, used.filtered)
            )
            greedy = draws.request_temperature.index_fill(0, torch.from_numpy(again), 0.0)
            draws = draws._replace(request_temperature=greedy)
        # Without an embedding there is no second product.
        head = self.head if used.has_next_step else replace(self.head, embedding=None)
        results = sample_rows(
            head,
            rows[some.rows],
            draws,
            adjustments,
            self.statistics.num_likeliest,
            named_tokens=self._named_tokens,
            allowed_ids=used.allowed_ids,
        )
        soft_embeds = results.soft_embeds
        self._write(some.slot, some.position, results._replace(soft_embeds=None))
        if soft_embeds is not None:
            if adjustments is not None:
                restart = self._token_masks.restart(some.rows)
                soft_embeds = torch.where(restart[:, None], 0.0, soft_embeds)
            self._store_soft_embeds(soft_embeds, some.slot, some.position)

    def _write_to_slots(self, slot: Tensor, position: Tensor, values: PositionStatistics) -> None:
        self.statistics.write(slot, position, values)

    def filtered_rows(self, index: Tensor, hidden: Tensor, used: UsedSettings) -> None:
        """Draw new candidates of rows with filters. The same row may come again.

        Args:
            index: [n], int64, which rows of the pass.
            hidden: [num_rows, hidden_size], of the pass.
            used: Settings that the pass uses.
        """
        some, statistics = self.settings.select(index), self.statistics
        slots = self._pass_rows.slots
        drawn = draw_filtered(
            self.head,
            self._logits_again(some, hidden[index], used),
            self.settings.draws(some),
            rows_of(used.filters, some.slot),
            slots.vocab_size,
            judges_kept=statistics.margin is not None,
        )
        statistics.candidate[some.slot, some.position] = drawn.candidate
        statistics.drawn_confidence[some.slot, some.position] = drawn.share
        if drawn.entropy is not None and drawn.margin is not None:
            assert statistics.margin is not None
            statistics.entropy[some.slot, some.position] = drawn.entropy
            statistics.margin[some.slot, some.position] = drawn.margin

    def reported_rows(
        self, index: Tensor, hidden: Tensor, used: UsedSettings, reports: LogprobsTensors
    ) -> None:
        """Write the log-probabilities of rows. The same row may come again.

        Args:
            index: [n], int64, which rows of the pass.
            hidden: [num_rows, hidden_size], of the pass.
            used: Settings that the pass uses.
            reports: Of all rows of the pass, output.
        """
        some, settings = self.settings.select(index), self.settings
        statistics = self.statistics
        logits = self._logits_again(some, hidden[index], used)
        adjustments = settings.reported_adjustments_of(some, used, logits.adjustments)
        request = settings.logprobs_request(some.slot, used)
        slots = self._pass_rows.slots
        # A masked model emits the tokens that it drew, and a draft is verified by drawing.
        of_tokens = slots.way.choose(
            lambda way: slots.spec.marks_undecided or way.layout.verifies,
            lambda is_drawn: statistics.candidate if is_drawn else statistics.argmax,
        )
        computed = row_logprobs(
            logits._replace(adjustments=adjustments),
            settings.reported_temperature(some.slot),
            of_tokens[some.slot, some.position],
            request,
            self.head,
        )
        write_rows(reports, index, computed)

    def decide(self) -> StepOutput:
        """Decide what becomes of every canvas."""
        return self._canvas_step(self.statistics, self._pass_rows.of_slots)

    def _logits_again(self, some: SelectedRows, rows: Tensor, used: UsedSettings) -> RowLogits:
        """Project rows of the pass again, onto all ids of this rank that some row may draw or
        report.

        Args:
            some: Which they are.
            rows: [n, hidden_size].
            used: Settings that the pass uses.
        """
        adjustments = self.settings.adjustments_of(some, used)
        projected = self.head.project_all(rows, used.allowed_ids)
        return RowLogits(projected, self.head.first_id, self.head.softcap, adjustments)
