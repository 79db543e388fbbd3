"""Log-probabilities of canvas rows, from their logits until their tokens are emitted."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.outputs import LogprobsTensors

from attention_kernels.vocab_statistics import RowLogits, scaled_logits
from vllm_diffusion.canvas.pass_rows import PassRows, rows_of
from vllm_diffusion.canvas.step import StepOutput
from vllm_diffusion.decoding.layouts import FirstRows
from vllm_diffusion.sampling.output_head import OutputHead

IMPOSSIBLE = float("-inf")
# What the logits of some rows take in float32: 32 rows of 262,144 ids.
FLOAT32_BYTES = 32 * 2**20


class LogprobsRequest(NamedTuple):
    """Log-probabilities that a batch wants of its rows.

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

    @property
    def num_columns(self) -> int:
        """Tokens that are reported of a row: its own, and others."""
        return 1 + max(self.num_top, self.token_ids.shape[1])


def no_logprobs(num_rows: int, num_columns: int, device: torch.device) -> LogprobsTensors:
    """Allocate log-probabilities of rows, of which nothing is reported yet."""
    return LogprobsTensors(
        torch.zeros(num_rows, num_columns, dtype=torch.int64, device=device),
        torch.full((num_rows, num_columns), IMPOSSIBLE, device=device),
        torch.zeros(num_rows, dtype=torch.int64, device=device),
    )


def write_rows(
    report: LogprobsTensors, rows: Tensor | tuple[Tensor, ...], values: LogprobsTensors
) -> None:
    """Write log-probabilities to rows of a report.

    Args:
        report: As wide as ``values``.
        rows: [n], int64, which rows; a pair of them for a table.
        values: Of n rows.
    """
    for held, given in zip(report[:3], values[:3], strict=True):
        held[rows] = given.to(held.dtype)


def row_logprobs(
    rows: RowLogits,
    divisor: Tensor,
    selected: Tensor,
    request: LogprobsRequest,
    head: OutputHead,
) -> LogprobsTensors:
    """Scores and ranks of each row's token, and of the other tokens that its request wants.

    Args:
        rows: This rank's ids.
        divisor: [num_rows], float32: of the distribution that is reported.
        selected: [num_rows], int64, each row's token.
        request: Log-probabilities that are wanted.
        head: Combines the ranks.

    Returns:
        Columns: the row's token, then the ids that its request names or the likeliest
        ones, and id 0 at minus infinity where a row has fewer.
    """
    # Every rank cuts in the same places, where kernels like it.
    most = FLOAT32_BYTES // (4 * head.shard_size)
    size = most // 16 * 16 or max(1, most)
    parts = [slice(start, start + size) for start in range(0, len(selected), size)]

    def some_rows() -> Iterator[tuple[slice, Tensor]]:
        for part in parts:
            scaled = scaled_logits(rows.rows(part), divisor[part])
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
    """Ids and scores besides a row's own token: the ids that its request names, or the
    likeliest.
    """
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
    """Log-probabilities that wait between the step that decided a token and the pass that emits it.

    They are written where the row's token goes, and read by position. Every pass returns those of
    every canvas of the batch, emitted or not, because only the device knows which requests emit;
    the engine takes as many as a request emitted.

    R is the number of slots, C the canvas length.
    """

    def __init__(self, pass_rows: PassRows) -> None:
        self._slots = slots = pass_rows.slots
        self._pass_rows = pass_rows
        self._draws_first_tokens = any(way.layout.draws_first_token for way in slots.spec.ways)
        # What nobody will read is written after a canvas.
        shape = (slots.num_slots, slots.canvas_length + 1)
        # [R, C + 1, width] and, ranks, [R, C + 1].
        self._waiting = LogprobsTensors(
            torch.empty(*shape, 0, dtype=torch.int64, device=slots.device),
            torch.empty(*shape, 0, device=slots.device),
            torch.zeros(shape, dtype=torch.int64, device=slots.device),
        )
        # [R], bool, canvases that the pass commits, where a layout asks for them.
        self._committed: Tensor | None = None

    def begin_pass(self) -> None:
        """Remember the canvases that the pass commits; call it before the step is decided."""
        if self._draws_first_tokens:
            self._committed = self._slots.draws_next_first

    def exchange(self, drawn: LogprobsTensors, step: StepOutput) -> LogprobsTensors:
        """Keep what this pass computed, and return what each request may emit now.

        A token is reported as it was when it was revealed, or rewritten; without a mask as it is in
        the last step, but for a request that asks which step decided it.

        Args:
            drawn: Log-probabilities of the tokens that the pass drew, of each of its rows.
            step: What the step decided.
        """
        pass_rows, layout = self._pass_rows, self._slots.spec.layout
        n = pass_rows.num_rows
        slot, position = pass_rows.slot[:n], pass_rows.position[:n]
        num_rows, is_last_known = pass_rows.requests.num_rows, pass_rows.requests.last_known
        width = max(drawn.logprobs.shape[1], self._waiting.logprobs.shape[2])
        drawn, self._waiting = _widened(drawn, width), _widened(self._waiting, width)
        owner, at = slot, position
        if self._draws_first_tokens:
            assert self._committed is not None
            committed, last_known = self._committed[slot], pass_rows.of_slots.last_known[slot]
            # A draft emits only what its commit draws.
            is_read = self._slots.way.choose(
                lambda way: way.layout.verifies,
                lambda verifies: committed if verifies else self._decided(step)[slot, position],
                slot,
            )
            first = FirstRows(lambda: committed, lambda: last_known)
            shift = self._slots.way.choose(
                lambda way: way.layout, lambda layout: layout.shift(position, first), slot
            )
            # A canvas begins in the row after that of the last known token.
            target = position + shift - last_known.to(position.dtype)
            self._write(drawn, slot, target, is_read | last_known)
            of_canvases = _on_device(np.flatnonzero(~np.repeat(is_last_known, num_rows)), slot)
            owner, at = slot[of_canvases], position[of_canvases]
        else:
            self._write(drawn, slot, position, self._decided(step)[slot, position])
        if layout.alignment > 1:
            # Known tokens that a canvas begins with are not emitted: as many last rows have nothing
            # to say.
            at = (at + step.num_given[owner]).clamp(max=self._slots.canvas_length - 1)
        emitted = rows_of(self._waiting, (owner, at))
        if self._draws_first_tokens:
            self._begin_canvases(drawn, step, slot)
        starts = np.concatenate([[0], np.cumsum(num_rows * ~is_last_known)])
        return emitted._replace(cu_num_generated_tokens=starts[:-1].tolist())

    def _decided(self, step: StepOutput) -> Tensor:
        """[R, C], bool: positions whose token this step decided, as far as it is known."""
        decided = step.decided
        if not self._slots.spec.marks_undecided:
            decided = decided | ~self._slots.requested.maps_steps[:, None]
        return decided & step.denoised[:, None]

    def _begin_canvases(self, drawn: LogprobsTensors, step: StepOutput, slot: Tensor) -> None:
        """Keep the log-probabilities of tokens with which canvases begin after committed ones.

        Args:
            drawn: Log-probabilities of the rows of the pass.
            step: What the step decided.
            slot: [num_rows], int64, of each row.
        """
        assert self._committed is not None
        requests = self._pass_rows.requests
        has_canvas = (requests.num_rows > 0) & ~requests.last_known
        first = _on_device(requests.starts[:-1][has_canvas], slot)
        owner = slot[first]
        predicting_position = self._slots.way.choose(
            lambda way: way.layout,
            lambda layout: layout.predicting_position(step.num_finished[owner]),
            owner,
        )
        row = first + predicting_position
        self._write(rows_of(drawn, row), owner, torch.zeros_like(owner), self._committed[owner])

    def _write(
        self, report: LogprobsTensors, slot: Tensor, position: Tensor, is_read: Tensor
    ) -> None:
        """Keep log-probabilities.

        Args:
            report: Of n tokens.
            slot: [n], int64.
            position: [n], int64, of each token in its canvas; C for the next canvas's first.
            is_read: [n], bool: tokens that a request may emit there.
        """
        where = (slot, torch.where(is_read, position, self._slots.canvas_length))
        write_rows(self._waiting, where, report)


def _on_device(values: np.ndarray, like: Tensor) -> Tensor:
    return async_tensor_h2d(values, device=like.device)


def _widened(report: LogprobsTensors, width: int) -> LogprobsTensors:
    """Return a report with ``width`` columns, of which the added ones are impossible tokens."""
    pad = (0, width - report.logprobs.shape[-1])
    if pad == (0, 0):
        return report
    return LogprobsTensors(
        F.pad(report.logprob_token_ids, pad),
        F.pad(report.logprobs, pad, value=IMPOSSIBLE),
        report.selected_token_ranks,
    )
