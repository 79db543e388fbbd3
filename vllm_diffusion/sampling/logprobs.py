"""Log-probabilities of canvas rows, swept from tiles of the vocabulary, and where they wait."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors

from vllm_diffusion.sampling.candidate_filters import Tiles
from vllm_diffusion.sampling.output_head import OutputHead

_IMPOSSIBLE = float("-inf")


class LogprobsRequest(NamedTuple):
    """What a batch wants to know of its rows.

    Attributes:
        num_top: Likeliest tokens of each row, 0 for none.
        token_ids: [num_rows, num_ids], int64: ids of a row that are reported in their place.
        num_token_ids: [num_rows], int32: how many of them a row has; 0 for the likeliest.
        as_logits: Report logits and not log-probabilities.
    """

    num_top: int
    token_ids: Tensor
    num_token_ids: Tensor
    as_logits: bool

    def rows(self, chunk: slice) -> LogprobsRequest:
        """Of some of the rows."""
        return self._replace(
            token_ids=self.token_ids[chunk], num_token_ids=self.num_token_ids[chunk]
        )


def row_logprobs(
    tiles: Tiles, selected: Tensor, request: LogprobsRequest, head: OutputHead
) -> LogprobsTensors:
    """Scores and ranks of each row's token, and of the others that were asked for.

    Args:
        tiles: Of this rank's ids: logits of the distribution that is reported.
        selected: [num_rows], int64, each row's token.
        request: What is wanted.
        head: Combines the ranks.

    Returns:
        Columns: the row's token, then the ids asked for or the likeliest ones; what a row has
        none of is id 0 at minus infinity.
    """
    num_rows = selected.shape[0]
    wanted = torch.cat([selected[:, None], request.token_ids], dim=1)
    swept = _sweep(tiles, wanted, request.num_top)
    maximum = head.gather(swept.maximum)
    largest = maximum.amax(dim=0)
    total = (head.gather(swept.total) * (maximum - largest).exp()).sum(dim=0)
    scores = head.gather(swept.scores).amax(dim=0)
    top_scores, top_ids = _likeliest(
        head.gather(swept.top_scores).transpose(0, 1).flatten(1),
        head.gather(swept.top_ids).transpose(0, 1).flatten(1),
        request.num_top,
    )

    ranks = torch.zeros(num_rows, dtype=torch.int64, device=selected.device)
    for _, logits in tiles():
        ranks += (logits >= scores[:, :1]).sum(dim=-1)
    ranks = head.sum(ranks)

    num_columns = max(request.num_top, request.token_ids.shape[1])
    pad = (0, num_columns - request.num_top)
    ids = torch.nn.functional.pad(top_ids, pad)
    others = torch.nn.functional.pad(top_scores, pad, value=_IMPOSSIBLE)
    if request.token_ids.shape[1] > 0:
        column = torch.arange(num_columns, device=selected.device)
        pad = (0, num_columns - request.token_ids.shape[1])
        asked = torch.nn.functional.pad(request.token_ids, pad)
        asked_scores = torch.nn.functional.pad(scores[:, 1:], pad, value=_IMPOSSIBLE)
        has_own = request.num_token_ids[:, None] > 0
        valid = column < request.num_token_ids[:, None]
        ids = torch.where(has_own, torch.where(valid, asked, 0), ids)
        others = torch.where(has_own, torch.where(valid, asked_scores, _IMPOSSIBLE), others)
    reported = torch.cat([scores[:, :1], others], dim=1)
    if not request.as_logits:
        reported = reported - (largest + total.log())[:, None]
    return LogprobsTensors(
        logprob_token_ids=torch.cat([selected[:, None], ids], dim=1),
        logprobs=reported,
        selected_token_ranks=ranks,
    )


class _Swept(NamedTuple):
    maximum: Tensor
    total: Tensor
    scores: Tensor
    top_scores: Tensor
    top_ids: Tensor


def _sweep(tiles: Tiles, wanted: Tensor, num_top: int) -> _Swept:
    """One look at this rank's ids: the softmax's sum, the ids wanted, and the likeliest."""
    num_rows, device = wanted.shape[0], wanted.device
    maximum = torch.full((num_rows,), _IMPOSSIBLE, device=device)
    total = torch.zeros(num_rows, device=device)
    scores = torch.full(wanted.shape, _IMPOSSIBLE, device=device)
    top_scores = torch.full((num_rows, num_top), _IMPOSSIBLE, device=device)
    top_ids = torch.zeros(num_rows, num_top, dtype=torch.int64, device=device)
    for first_id, logits in tiles():
        larger = torch.maximum(maximum, logits.amax(dim=-1))
        shift = torch.where(larger == _IMPOSSIBLE, 0.0, larger)
        total = total * (maximum - shift).exp() + (logits - shift[:, None]).exp().sum(dim=-1)
        maximum = larger
        column = wanted - first_id
        found = (column >= 0) & (column < logits.shape[1])
        values = logits.gather(-1, column.clamp(0, logits.shape[1] - 1))
        scores = torch.where(found, values, scores)
        if num_top > 0:
            tile_scores, tile_ids = logits.topk(min(num_top, logits.shape[1]), dim=-1)
            top_scores, top_ids = _likeliest(
                torch.cat([top_scores, tile_scores], dim=1),
                torch.cat([top_ids, tile_ids + first_id], dim=1),
                num_top,
            )
    return _Swept(maximum, total, scores, top_scores, top_ids)


def _likeliest(scores: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    top, index = scores.topk(num_top, dim=-1)
    return top, ids.gather(-1, index)


class LogprobsStash:
    """Log-probabilities wait here between the step that decided a canvas and its encode pass.

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
        encoding: Tensor,
        cu_num_logits_np: np.ndarray,
    ) -> LogprobsTensors:
        """Stash what this pass computed, and return what each row's request may emit now.

        Args:
            computed: This pass's log-probabilities, in row order.
            row_slots: [num_rows], int64.
            row_positions: [num_rows], int64.
            encoding: [R], bool: slots whose rows are a finished canvas, whose log-probabilities
                were computed before.
            cu_num_logits_np: [num_reqs + 1], where each request's rows start.
        """
        ids, logprobs, ranks = (
            computed.logprob_token_ids,
            computed.logprobs,
            computed.selected_token_ranks,
        )
        width = ids.shape[1]
        self._grow(width)
        encoded = encoding[row_slots]
        stashed_ids = self._ids[row_slots, row_positions]
        stashed_logprobs = self._logprobs[row_slots, row_positions]
        stashed_ranks = self._ranks[row_slots, row_positions]
        pad = self._width - width
        ids = torch.nn.functional.pad(ids, (0, pad))
        logprobs = torch.nn.functional.pad(logprobs, (0, pad), value=float("-inf"))
        ids = torch.where(encoded[:, None], stashed_ids, ids)
        logprobs = torch.where(encoded[:, None], stashed_logprobs, logprobs)
        ranks = torch.where(encoded, stashed_ranks, ranks)
        self._ids[row_slots, row_positions] = ids
        self._logprobs[row_slots, row_positions] = logprobs
        self._ranks[row_slots, row_positions] = ranks
        return LogprobsTensors(
            logprob_token_ids=ids,
            logprobs=logprobs,
            selected_token_ranks=ranks,
            cu_num_generated_tokens=cu_num_logits_np[:-1].tolist(),
        )
