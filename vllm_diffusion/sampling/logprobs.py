"""Log-probabilities of canvas rows, from logits that were kept, and where they wait."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from attention_kernels.vocab_statistics import RowLogits, scaled_logits
from vllm_diffusion.sampling.output_head import OutputHead

_IMPOSSIBLE = float("-inf")


class LogprobsRequest(NamedTuple):
    """What a batch wants to know of its rows.

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
        """Of what is reported: the row's own token, and others."""
        return 1 + max(self.num_top, self.token_ids.shape[1])

    def rows(self, some: slice | Tensor) -> LogprobsRequest:
        """Of some of the rows."""
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
    """Scores and ranks of each row's token, and of the others that were asked for.

    Args:
        rows: This rank's ids.
        divisor: [num_rows], float32: of the distribution that is reported.
        selected: [num_rows], int64, each row's token.
        request: What is wanted.
        head: Combines the ranks.
        rows_at_once: Rows that are in float32 at the same time.

    Returns:
        Columns: the row's token, then the ids asked for or the likeliest ones; what a row has
        none of is id 0 at minus infinity.
    """
    parts = [slice(start, start + rows_at_once) for start in range(0, len(selected), rows_at_once)]

    def some_rows() -> Iterator[tuple[slice, Tensor]]:
        for part in parts:
            yield part, scaled_logits(rows.rows(part), divisor[part])

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


def merge_held(held: LogprobsTensors, drawn: LogprobsTensors, keeps: Tensor) -> LogprobsTensors:
    """Log-probabilities of the tokens that a pass leaves at its rows' positions.

    Args:
        held: Of the tokens that stood there before the pass.
        drawn: Of the tokens that it drew.
        keeps: [num_rows], bool: rows whose position the step did not write.
    """
    return LogprobsTensors(
        torch.where(keeps[:, None], held.logprob_token_ids, drawn.logprob_token_ids),
        torch.where(keeps[:, None], held.logprobs, drawn.logprobs),
        torch.where(keeps, held.selected_token_ranks, drawn.selected_token_ranks),
    )


def _summary(
    logits: Tensor, first_id: int, wanted: Tensor, request: LogprobsRequest
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of this rank's ids of some rows.

    Args:
        logits: [num_rows, num_ids], float32.
        first_id: The first of the ids.
        wanted: [num_rows, n], int64: ids whose scores are asked for.
        request: What else is wanted.

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
    scores = torch.full(wanted.shape, _IMPOSSIBLE, device=logits.device)
    if num_ids > 0:
        scores = logits.gather(1, column.clamp(0, num_ids - 1))
        scores = torch.where(inside, scores, _IMPOSSIBLE)
    return (
        logits.logsumexp(dim=1),
        scores,
        torch.nn.functional.pad(top.gather(1, order), pad, value=_IMPOSSIBLE),
        torch.nn.functional.pad(index + first_id, pad),
    )


def _columns(
    request: LogprobsRequest, top_ids: Tensor, top_scores: Tensor, asked_scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Ids and scores beside a row's own token: those it asks for, or its likeliest."""
    num_columns = request.num_columns - 1
    pad = (0, num_columns - request.num_top)
    ids = torch.nn.functional.pad(top_ids[:, : request.num_top], pad)
    scores = torch.nn.functional.pad(top_scores[:, : request.num_top], pad, value=_IMPOSSIBLE)
    if request.token_ids.shape[1] == 0:
        return ids, scores
    pad = (0, num_columns - request.token_ids.shape[1])
    asked = torch.nn.functional.pad(request.token_ids, pad)
    asked_scores = torch.nn.functional.pad(asked_scores, pad, value=_IMPOSSIBLE)
    has_own = request.num_token_ids[:, None] > 0
    valid = torch.arange(num_columns, device=ids.device) < request.num_token_ids[:, None]
    return (
        torch.where(has_own, torch.where(valid, asked, 0), ids),
        torch.where(has_own, torch.where(valid, asked_scores, _IMPOSSIBLE), scores),
    )


class LogprobsStash:
    """Log-probabilities wait here between the step that decided a token and the pass that emits it.

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
        ids, logprobs, ranks = (
            computed.logprob_token_ids,
            computed.logprobs,
            computed.selected_token_ranks,
        )
        width = ids.shape[1]
        self._grow(width)
        stashed_ids = self._ids[row_slots, row_positions]
        stashed_logprobs = self._logprobs[row_slots, row_positions]
        stashed_ranks = self._ranks[row_slots, row_positions]
        pad = self._width - width
        ids = torch.nn.functional.pad(ids, (0, pad))
        logprobs = torch.nn.functional.pad(logprobs, (0, pad), value=float("-inf"))
        ids = torch.where(is_decided[:, None], stashed_ids, ids)
        logprobs = torch.where(is_decided[:, None], stashed_logprobs, logprobs)
        ranks = torch.where(is_decided, stashed_ranks, ranks)
        self._ids[row_slots, row_positions] = ids
        self._logprobs[row_slots, row_positions] = logprobs
        self._ranks[row_slots, row_positions] = ranks
        return LogprobsTensors(
            logprob_token_ids=ids[emitted],
            logprobs=logprobs[emitted],
            selected_token_ranks=ranks[emitted],
            cu_num_generated_tokens=starts[:-1].tolist(),
        )

    def begin(self, computed: LogprobsTensors, row: Tensor, slot: Tensor, begins: Tensor) -> None:
        """Stash the log-probabilities of first tokens of canvases.

        Args:
            computed: Of a pass.
            row: [n], int64: rows in it.
            slot: [n], int64, each once.
            begins: [n], bool: which of them do begin.
        """
        pad = self._width - computed.logprobs.shape[1]
        ids = torch.nn.functional.pad(computed.logprob_token_ids[row], (0, pad))
        logprobs = torch.nn.functional.pad(computed.logprobs[row], (0, pad), value=float("-inf"))
        ranks = computed.selected_token_ranks[row]
        self._ids[slot, 0] = torch.where(begins[:, None], ids, self._ids[slot, 0])
        self._logprobs[slot, 0] = torch.where(begins[:, None], logprobs, self._logprobs[slot, 0])
        self._ranks[slot, 0] = torch.where(begins, ranks, self._ranks[slot, 0])
