"""Log-probabilities of canvas rows, from logits that were kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from attention_kernels.vocab_statistics import RowLogits, scaled_logits
from vllm_diffusion.sampling.output_head import OutputHead

_IMPOSSIBLE = float("-inf")


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
    request: LogprobsRequest, top_ids: Tensor, top_scores: Tensor, named_scores: Tensor
) -> tuple[Tensor, Tensor]:
    """Ids and scores beside a row's own token: the ids that its request names, or the likeliest."""
    num_columns = request.num_columns - 1
    pad = (0, num_columns - request.num_top)
    ids = torch.nn.functional.pad(top_ids[:, : request.num_top], pad)
    scores = torch.nn.functional.pad(top_scores[:, : request.num_top], pad, value=_IMPOSSIBLE)
    if request.token_ids.shape[1] == 0:
        return ids, scores
    pad = (0, num_columns - request.token_ids.shape[1])
    named = torch.nn.functional.pad(request.token_ids, pad)
    named_scores = torch.nn.functional.pad(named_scores, pad, value=_IMPOSSIBLE)
    has_own = request.num_token_ids[:, None] > 0
    valid = torch.arange(num_columns, device=ids.device) < request.num_token_ids[:, None]
    return (
        torch.where(has_own, torch.where(valid, named, 0), ids),
        torch.where(has_own, torch.where(valid, named_scores, _IMPOSSIBLE), scores),
    )
