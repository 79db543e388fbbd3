"""Statistics of the rows of a pass, scattered to the positions of their canvases."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attention_kernels.vocab_statistics import LogitAdjustments, RowDraws, RowLogits
from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.canvas.slots import CanvasSlots
from vllm_diffusion.sampling.candidate_filters import CandidateFilters
from vllm_diffusion.sampling.constraint_tensors import ConstraintTensors
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.pass_settings import SelectedRows
from vllm_diffusion.sampling.row_settings import RowSettings
from vllm_diffusion.sampling.vocabulary_stream import RowResults, draw_filtered, sample_rows

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

    def draw_again(
        self, some: SelectedRows, logits: RowLogits, draws: RowDraws, filters: CandidateFilters
    ) -> None:
        """Draw new candidates for rows with filters, once the statistics of all rows are known.

        Args:
            some: The rows.
            logits: Their logits of all ids.
            draws: Their temperatures and keys.
            filters: What is kept of each row's distribution.
        """
        candidate, confidence = draw_filtered(
            self.head, logits.projected, draws, logits.adjustments, filters, self._vocab_size
        )
        self.of_slots.candidate[some.slot, some.position] = candidate
        self.of_slots.drawn_confidence[some.slot, some.position] = confidence

    def logits(self, rows: Tensor, adjustments: LogitAdjustments | None) -> RowLogits:
        """Project rows to all ids of this rank.

        Args:
            rows: [n, hidden_size].
            adjustments: Adjustments of the logits.
        """
        projected = self.head.project(rows, slice(0, len(self.head.weight)))
        return RowLogits(projected, self.head.first_id, self.head.softcap, adjustments)
