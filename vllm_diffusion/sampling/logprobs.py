"""Log-probabilities of canvas rows, from kept logits, until their tokens are emitted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from attention_kernels.vocab_statistics import RowLogits, scaled_logits
from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.canvas.slots import CanvasSlots, Phase
from vllm_diffusion.canvas.step import StepOutput
from vllm_diffusion.sampling.output_head import OutputHead

IMPOSSIBLE = float("-inf")


class LogprobsRequest(NamedTuple):
    """Log-probabilities that a batch wants of its rows.

    Attributes:
        num_top: Likeliest tokens of each row, 0 for none.
        token_ids: [num_rows, num_ids], int64: ids of a row that are reported in their place.
        num_token_ids: [num_rows], int32: how many of them a row has; 0 for the likeliest.
        as_logits: Report logits and not log-probabilities.
        of_drawn: A row's own token is the one that was drawn, not the likeliest.
        held: [num_rows], int64: tokens that stand at the rows' positions before the pass, which are
            reported beside those that are drawn; ``None`` if no request brought any.
    """

    num_top: int
    token_ids: Tensor
    num_token_ids: Tensor
    as_logits: bool
    of_drawn: bool = False
    held: Tensor | None = None

    @property
    def num_columns(self) -> int:
        """Tokens that are reported of a row: its own, and others."""
        return 1 + max(self.num_top, self.token_ids.shape[1])

    def rows(self, some: slice | Tensor) -> LogprobsRequest:
        """The request of some of the rows."""
        return self._replace(
            token_ids=self.token_ids[some],
            num_token_ids=self.num_token_ids[some],
            held=None if self.held is None else self.held[some],
        )


def row_logprobs(
    rows: RowLogits,
    divisor: Tensor,
    selected: Tensor,
    request: LogprobsRequest,
    head: OutputHead,
    rows_at_once: int,
) -> LogprobsTensors:
    """Scores and ranks of each row's token, and of the other tokens that its request wants.

    Args:
        rows: This rank's ids.
        divisor: [num_rows], float32: of the distribution that is reported.
        selected: [num_rows], int64, each row's token.
        request: Log-probabilities that are wanted.
        head: Combines the ranks, and says which kernel scales the logits.
        rows_at_once: Rows that are in float32 at the same time.

    Returns:
        Columns: the row's token, then the ids that its request names or the likeliest
        ones, and id 0 at minus infinity where a row has fewer.
    """
    parts = [slice(start, start + rows_at_once) for start in range(0, len(selected), rows_at_once)]

    def some_rows() -> Iterator[tuple[slice, Tensor]]:
        for part in parts:
            scaled = scaled_logits(rows.rows(part), divisor[part], impl=head.kernels.kept_rows)
            yield part, scaled

    wanted = torch.cat([selected[:, None], request.token_ids], dim=1)
    own = [_summary(logits, rows.first_id, wanted[part], request) for part, logits in some_rows()]
    log_total, scores, top_scores, top_ids = (
        head.gather(torch.cat(values)) for values in zip(*own, strict=True)
    )
    scores = scores.amax(dim=0)
    # Equal scores in ascending order of ids.
    top_scores, order = (
        top_scores.transpose(0, 1).flatten(1).sort(dim=1, descending=True, stable=True)
    )
    top_ids = top_ids.transpose(0, 1).flatten(1).gather(1, order)

    ranks = [(logits >= scores[part, :1]).sum(dim=1) for part, logits in some_rows()]
    ids, others = _columns(request, top_ids, top_scores, scores[:, 1:])
    reported = torch.cat([scores[:, :1], others], dim=1)
    if not request.as_logits:
        reported = reported - log_total.logsumexp(dim=0)[:, None]
    return LogprobsTensors(
        logprob_token_ids=torch.cat([selected[:, None], ids], dim=1),
        logprobs=reported,
        selected_token_ranks=head.sum(torch.cat(ranks)),
    )


def _summary(
    logits: Tensor, first_id: int, wanted: Tensor, request: LogprobsRequest
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Summarise this rank's logits of some rows.

    Args:
        logits: [num_rows, num_ids], float32.
        first_id: The first of the ids.
        wanted: [num_rows, n], int64: ids whose scores are wanted.
        request: What else is reported.

    Returns:
        [num_rows], the logarithm of the sum of exponentials; [num_rows, n], scores of ``wanted``,
        minus infinity for other ranks' ids; [num_rows, num_top], the largest scores and their ids,
        ascending where scores are equal.
    """
    num_ids = logits.shape[1]
    num_own = min(request.num_top, num_ids)
    top, index = logits.topk(num_own, dim=1)
    # topk() leaves equal ones in any order.
    index, order = index.sort(dim=1)
    pad = (0, request.num_top - num_own)
    # The very numbers that ranks are counted with: another kernel's differ in a bit.
    column = wanted - first_id
    inside = (column >= 0) & (column < num_ids)
    scores = torch.full(wanted.shape, IMPOSSIBLE, device=logits.device)
    if num_ids > 0:
        scores = logits.gather(1, column.clamp(0, num_ids - 1))
        scores = torch.where(inside, scores, IMPOSSIBLE)
    return (
        logits.logsumexp(dim=1),
        scores,
        F.pad(top.gather(1, order), pad, value=IMPOSSIBLE),
        F.pad(index + first_id, pad),
    )


def _columns(
    request: LogprobsRequest, top_ids: Tensor, top_scores: Tensor, named_scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Ids and scores beside a row's own token: the ids that its request names, or the likeliest."""
    num_columns = request.num_columns - 1
    pad = (0, num_columns - request.num_top)
    ids = F.pad(top_ids[:, : request.num_top], pad)
    scores = F.pad(top_scores[:, : request.num_top], pad, value=IMPOSSIBLE)
    if request.token_ids.shape[1] == 0:
        return ids, scores
    pad = (0, num_columns - request.token_ids.shape[1])
    named = F.pad(request.token_ids, pad)
    named_scores = F.pad(named_scores, pad, value=IMPOSSIBLE)
    has_own = request.num_token_ids[:, None] > 0
    valid = torch.arange(num_columns, device=ids.device) < request.num_token_ids[:, None]
    return (
        torch.where(has_own, torch.where(valid, named, 0), ids),
        torch.where(has_own, torch.where(valid, named_scores, IMPOSSIBLE), scores),
    )


class EmittedLogprobs:
    """Log-probabilities of the tokens that each pass emits.

    R is the number of slots, C the canvas length.
    """

    def __init__(self, slots: CanvasSlots, pass_rows: PassRows) -> None:
        self._slots = slots
        self._pass_rows = pass_rows
        self._stash = LogprobsStash(slots.num_slots, slots.canvas_length, slots.device)
        # [R], bool, canvases that the pass commits; [R, C], bool, positions that are pinned in it.
        self._committed: Tensor | None = None
        self._pinned: Tensor | None = None

    def begin_pass(self) -> None:
        """Remember the canvases as the pass finds them; call it before the step is decided."""
        self._committed = self._slots.phase == int(Phase.COMMITTING)
        self._pinned = self._slots.pinned.clone()

    def exchange(
        self, drawn: LogprobsTensors, held: LogprobsTensors | None, step: StepOutput
    ) -> LogprobsTensors:
        """Keep what this pass computed, and return what each request may emit now.

        A token is reported as it was when it was revealed, or rewritten; without a mask as it is in
        the last step, but for a request that asks which step decided it.

        Args:
            drawn: Log-probabilities of the tokens that the pass drew, of each of its rows.
            held: The same of the tokens that stood there before; ``None`` if no request brought any.
            step: What the step decided.
        """
        assert self._committed is not None
        assert self._pinned is not None
        places, layout, committed = self._pass_rows, self._slots.spec.layout, self._committed
        slot, position = places.slot[: places.num_rows], places.position[: places.num_rows]
        if held is not None:
            # Rows of a pass that writes known tokens report the tokens drawn behind them.
            drawn = _merge(held, drawn, step.denoised[slot] & ~step.decided[slot, position])
        is_seed = places.of_slots.seeding[slot]
        is_decided = self._is_decided(step, slot, position, is_seed)
        was_reported = layout.was_reported(position, is_seed, is_decided | committed[slot])
        row = layout.reporting_row(position)
        computed = drawn if row is None else _rows_of(drawn, row)
        emitted, starts = self._emitted(step, slot)
        output = self._stash.exchange(computed, slot, position, was_reported, emitted, starts)
        self._begin_canvases(drawn, step, slot)
        return output

    def _is_decided(
        self, step: StepOutput, slot: Tensor, position: Tensor, is_seed: Tensor
    ) -> Tensor:
        """[num_rows], bool: rows whose token an earlier step decided.

        Args:
            step: What the step decided.
            slot: [num_rows], int64, of each row.
            position: [num_rows], int64, in its canvas.
            is_seed: [num_rows], bool: rows of known tokens behind which a canvas begins.
        """
        assert self._pinned is not None
        spec = self._slots.spec
        is_decided = ~step.decided[slot, position]
        if spec.mask_token_id is None:
            return is_decided & self._slots.requested.maps_steps[slot]
        unwritten = step.decided_step[slot, position] == 0
        is_given = spec.layout.is_given(unwritten, position, self._pinned[slot, position])
        return is_decided & ~is_given & ~is_seed

    def _emitted(self, step: StepOutput, slot: Tensor) -> tuple[Tensor, np.ndarray]:
        """Rows of canvases in the order in which they are emitted.

        Args:
            step: What the step decided.
            slot: [num_rows], int64, of each row of the pass.

        Returns:
            [num_emitted], int64, which rows, and [num_reqs + 1], where each request's are among them.
        """
        requests = self._pass_rows.requests
        num_rows, seeding = requests.num_rows, requests.seeding
        canvas_rows = async_tensor_h2d(
            np.flatnonzero(~np.repeat(seeding, num_rows)), device=slot.device
        )
        # The known tokens that a canvas begins with are not emitted.
        emitted = self._slots.spec.layout.emitted_row(
            canvas_rows, lambda: step.num_given[slot[canvas_rows]], len(slot)
        )
        return emitted, np.concatenate([[0], np.cumsum(num_rows * ~seeding)])

    def _begin_canvases(self, drawn: LogprobsTensors, step: StepOutput, slot: Tensor) -> None:
        """Keep the log-probabilities of tokens with which canvases begin behind committed ones.

        Args:
            drawn: Log-probabilities of the rows of the pass.
            step: What the step decided.
            slot: [num_rows], int64, of each row.
        """
        layout = self._slots.spec.layout
        if not layout.starts_from_commit:
            return
        assert self._committed is not None
        requests = self._pass_rows.requests
        has_canvas = (requests.num_rows > 0) & ~requests.seeding
        first, count = async_tensor_h2d(
            np.stack([requests.starts[:-1][has_canvas], requests.num_rows[has_canvas]]),
            device=slot.device,
        )
        owner = slot[first]
        row = layout.seed_row(first, count, step.num_finished[owner])
        self._stash.begin(drawn, row, owner, self._committed[owner])


def _rows_of(report: LogprobsTensors, row: Tensor | tuple[Tensor, ...]) -> LogprobsTensors:
    """Select rows of a report.

    Args:
        report: Log-probabilities.
        row: [n], int64, which rows, in their order in the result; a pair of them for a table.
    """
    return LogprobsTensors(
        report.logprob_token_ids[row], report.logprobs[row], report.selected_token_ranks[row]
    )


def _merge(held: LogprobsTensors, drawn: LogprobsTensors, keeps: Tensor) -> LogprobsTensors:
    """Take rows of one report where they are kept, and of the other elsewhere.

    Args:
        held: Log-probabilities of rows that may be kept.
        drawn: Log-probabilities of as many other rows.
        keeps: [num_rows], bool: rows of ``held`` that are kept.
    """
    return LogprobsTensors(
        torch.where(keeps[:, None], held.logprob_token_ids, drawn.logprob_token_ids),
        torch.where(keeps[:, None], held.logprobs, drawn.logprobs),
        torch.where(keeps, held.selected_token_ranks, drawn.selected_token_ranks),
    )


def _widened(report: LogprobsTensors, width: int) -> LogprobsTensors:
    """Return a report with ``width`` columns, of which the added ones are impossible tokens."""
    pad = (0, width - report.logprobs.shape[-1])
    return LogprobsTensors(
        F.pad(report.logprob_token_ids, pad),
        F.pad(report.logprobs, pad, value=IMPOSSIBLE),
        report.selected_token_ranks,
    )


class LogprobsStash:
    """Log-probabilities that wait between the step that decided a token and the pass that emits it.

    Every pass returns rows for every request of the batch, decided or not, because only the
    device knows which requests emit; the engine takes as many as a request emitted.
    """

    def __init__(self, num_slots: int, canvas_length: int, device: torch.device) -> None:
        shape = (num_slots, canvas_length)
        # [num_slots, canvas_length, width] and, ranks, [num_slots, canvas_length].
        self._table = LogprobsTensors(
            torch.empty(*shape, 0, dtype=torch.int64, device=device),
            torch.empty(*shape, 0, device=device),
            torch.zeros(shape, dtype=torch.int64, device=device),
        )

    @property
    def _width(self) -> int:
        return self._table.logprobs.shape[-1]

    def _write(self, where: tuple[Tensor, Tensor], report: LogprobsTensors) -> None:
        self._table.logprob_token_ids[where] = report.logprob_token_ids
        self._table.logprobs[where] = report.logprobs
        self._table.selected_token_ranks[where] = report.selected_token_ranks

    def exchange(
        self,
        computed: LogprobsTensors,
        row_slots: Tensor,
        row_positions: Tensor,
        is_decided: Tensor,
        emitted: Tensor,
        starts: np.ndarray,
    ) -> LogprobsTensors:
        """Stash what this pass computed, and return what each row's request may emit now.

        Args:
            computed: This pass's log-probabilities, in row order.
            row_slots: [num_rows], int64.
            row_positions: [num_rows], int64.
            is_decided: [num_rows], bool: rows whose log-probabilities were computed before.
            emitted: [num_emitted], int64: the rows in the order in which they are emitted.
            starts: [num_reqs + 1], where each request's are among them.
        """
        where = (row_slots, row_positions)
        if (width := computed.logprobs.shape[1]) > self._width:
            self._table = _widened(self._table, width)
        stashed = _rows_of(self._table, where)
        rows = _merge(stashed, _widened(computed, self._width), is_decided)
        self._write(where, rows)
        return _rows_of(rows, emitted)._replace(cu_num_generated_tokens=starts[:-1].tolist())

    def begin(self, computed: LogprobsTensors, row: Tensor, slot: Tensor, begins: Tensor) -> None:
        """Stash the log-probabilities of first tokens of canvases.

        Args:
            computed: Log-probabilities of a pass.
            row: [n], int64: rows of the pass.
            slot: [n], int64, each once.
            begins: [n], bool: slots whose canvas does begin.
        """
        where = (slot, torch.zeros_like(slot))
        first = _widened(_rows_of(computed, row), self._width)
        self._write(where, _merge(first, _rows_of(self._table, where), begins))
