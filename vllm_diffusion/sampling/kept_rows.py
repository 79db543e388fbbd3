"""Rows of a pass whose logits are read more than once: those with filters or log-probabilities, and the likeliest
tokens that a rule asks for.

Top-k, top-p and min-p keep the tokens whose logit is at least a threshold of the row. The threshold is
searched for, without ever sorting a row: a sweep counts what lies above each of some pivots, and the next one
divides the piece that holds it. Counts and masses are integers, so no number of ranks changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from attention_kernels.vocab_statistics import (
    LEAST_KEY,
    Impl,
    LogitAdjustments,
    RowDraws,
    RowLogits,
    largest_key,
    ordered_keys,
    scaled_logits,
    weigh,
)
from vllm_diffusion.sampling.logprobs import IMPOSSIBLE, LogprobsRequest
from vllm_diffusion.sampling.output_head import OutputHead


class CandidateFilters(NamedTuple):
    """Restrictions of the candidate's distribution; ``None`` where no row has one.

    Attributes:
        top_k: [num_rows], integer; the vocabulary size is off.
        top_p: [num_rows], float32; 1 is off.
        min_p: [num_rows], float32; 0 is off.
    """

    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None

    def rows(self, some: slice | Tensor) -> CandidateFilters:
        """The filters of some of the rows."""
        return CandidateFilters(*(None if x is None else x[some] for x in self))


def thresholds(
    rows: RowLogits,
    divisor: Tensor,
    maximum: Tensor,
    filters: CandidateFilters,
    vocab_size: int,
    head: OutputHead,
) -> Tensor:
    """The least logit that each row keeps, as an ordered key.

    In vLLM's order and with its definitions: min-p, then top-k of what it leaves, then top-p of
    what that leaves. Ties with the last token kept are kept.

    Args:
        rows: This rank's ids.
        divisor: [num_rows], float32: of the candidate's distribution.
        maximum: [num_rows], float32, the largest logit of each row, of all ranks, over ``divisor``.
        filters: One entry per row.
        vocab_size: Number of ids, of all ranks.
        head: Sums over the ranks, and says which kernels search.

    Returns:
        [num_rows], int64.
    """

    impl = head.kernels.kept_rows

    def weighed(by_mass: bool) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda pivots, bounds: head.sum(
            weigh(rows, divisor, maximum, pivots, bounds, by_mass=by_mass, impl=impl)
        )

    def largest(by_mass: bool, wanted: Tensor, active: Tensor) -> Tensor:
        return largest_key(weighed(by_mass), wanted, maximum, active, impl=impl)

    keys = torch.full(maximum.shape, LEAST_KEY, dtype=torch.int64, device=maximum.device)
    if filters.min_p is not None:
        # At least this fraction of the likeliest token's probability.
        keys = ordered_keys(maximum + filters.min_p.log())
    if filters.top_k is not None:
        wanted = filters.top_k.long().clamp(1, vocab_size)
        active = filters.top_k < vocab_size
        keys = torch.maximum(keys, largest(False, wanted, active))
    if filters.top_p is not None:
        # The smallest set of likeliest tokens whose probability reaches p of what is left.
        active = filters.top_p < 1.0
        everything = torch.stack([keys, ordered_keys(maximum) + 2], dim=1)
        kept = weighed(True)(keys[:, None], everything)[:, 0]
        wanted = (kept.double() * filters.top_p.double()).ceil().long().clamp(min=1)
        nucleus = largest(True, torch.minimum(wanted, kept), active)
        keys = torch.maximum(keys, nucleus)
    return keys


class RunningChoices:
    """The likeliest tokens of the tiles so far, for rules that look beyond the likeliest one."""

    def __init__(self, num_rows: int, num_likeliest: int, device: torch.device) -> None:
        self._scores = torch.full((num_rows, num_likeliest), IMPOSSIBLE, device=device)
        self._ids = torch.zeros(num_rows, num_likeliest, dtype=torch.int64, device=device)

    def update(self, rows: RowLogits, divisor: Tensor, impl: Impl = "auto") -> None:
        """Take one tile, in ascending order of ids.

        Args:
            rows: The tile.
            divisor: [num_rows], float32, above 0.
            impl: Implementation that scales the logits.
        """
        logits = scaled_logits(rows, divisor, impl=impl)
        scores, ids = [self._scores], [self._ids]
        # Not topk(), which takes any of equal ones.
        for _ in range(min(self._ids.shape[1], logits.shape[1])):
            index = logits.argmax(dim=-1, keepdim=True)
            scores.append(logits.gather(-1, index))
            ids.append(index + rows.first_id)
            logits.scatter_(-1, index, IMPOSSIBLE)
        self._keep(torch.cat(scores, dim=-1), torch.cat(ids, dim=-1))

    def _keep(self, scores: Tensor, ids: Tensor) -> None:
        """Keep the best scores; equal ones come in ascending order of ids."""
        scores, order = scores.sort(dim=-1, descending=True, stable=True)
        num_likeliest = self._ids.shape[1]
        self._scores = scores[:, :num_likeliest]
        self._ids = ids.gather(-1, order[:, :num_likeliest])

    def of_all_ranks(self, head: OutputHead) -> Tensor:
        """[num_rows, num_likeliest], int64: the likeliest first, the lower id of equals.

        A row with fewer possible ids repeats the last of them.

        Args:
            head: Combines the ranks.
        """
        if head.num_shards > 1:
            parts = (head.gather(self._scores), head.gather(self._ids))
            scores, ids = (part.transpose(0, 1).flatten(1) for part in parts)
            self._keep(scores, ids)
        choices = [self._ids[:, 0]]
        for i in range(1, self._ids.shape[1]):
            is_possible = self._scores[:, i] > IMPOSSIBLE
            choices.append(torch.where(is_possible, self._ids[:, i], choices[-1]))
        return torch.stack(choices, dim=-1)


@dataclass(frozen=True)
class FilteredRows:
    """Rows whose candidates are drawn from a part of the distribution; an entry for each.

    Attributes:
        index: [n], int64, ascending, on the host: which rows of the pass.
        filters: [n] each: their filters.
    """

    index: np.ndarray
    filters: CandidateFilters

    def within(self, chunk: slice) -> FilteredRows | None:
        """The entries in a chunk of the pass, counted from its start; ``None`` if it has none."""
        some = _inside(self.index, chunk)
        if some.start == some.stop:
            return None
        return FilteredRows(self.index[some] - chunk.start, self.filters.rows(some))


@dataclass(frozen=True)
class ReportedRows:
    """Rows whose log-probabilities are reported; an entry for each.

    Attributes:
        index: [n], int64, ascending, on the host: which rows of the pass.
        request: Log-probabilities that are reported.
        adjustments: Adjustments of the reported distribution; ``None`` if there are none.
        temperature: [n], float32: what reported logits are divided by.
    """

    index: np.ndarray
    request: LogprobsRequest
    adjustments: LogitAdjustments | None
    temperature: Tensor

    def rows(self, some: slice | Tensor) -> tuple[LogprobsRequest, LogitAdjustments | None, Tensor]:
        """Request, adjustments and temperatures of some of the entries."""
        adjustments = None if self.adjustments is None else self.adjustments.rows(some)
        return self.request.rows(some), adjustments, self.temperature[some]

    def within(self, chunk: slice) -> ReportedRows | None:
        """The entries in a chunk of the pass, counted from its start; ``None`` if it has none."""
        some = _inside(self.index, chunk)
        if some.start == some.stop:
            return None
        return ReportedRows(self.index[some] - chunk.start, *self.rows(some))


def _inside(index: np.ndarray, chunk: slice) -> slice:
    first, end = np.searchsorted(index, (chunk.start, chunk.stop))
    return slice(int(first), int(end))


@dataclass(frozen=True)
class RowSettings:
    """Settings of the canvas rows of a pass.

    Attributes:
        draws: Temperatures and noise keys.
        adjustments: Adjustments of the logits; ``None`` if there are none.
        filtered: Rows with filters; ``None`` if there are none.
        reported: Rows with log-probabilities; ``None`` if there are none.
        num_likeliest: Likeliest tokens that the decoding rule looks at, of every row.
    """

    draws: RowDraws
    adjustments: LogitAdjustments | None = None
    filtered: FilteredRows | None = None
    reported: ReportedRows | None = None
    num_likeliest: int = 0

    def within(self, chunk: slice) -> RowSettings:
        """Settings of some of the rows."""
        return RowSettings(
            self.draws.rows(chunk),
            None if self.adjustments is None else self.adjustments.rows(chunk),
            None if self.filtered is None else self.filtered.within(chunk),
            None if self.reported is None else self.reported.within(chunk),
            self.num_likeliest,
        )

    def kept(self) -> np.ndarray:
        """[n], int64, ascending: rows that are looked at more than once."""
        some = [part.index for part in (self.filtered, self.reported) if part is not None]
        return np.unique(np.concatenate(some)) if some else np.empty(0, dtype=np.int64)


class KeptRows:
    """Rows of a group whose projected logits are kept, and in which order.

    First those that are only filtered, then those that are filtered and reported, then those that
    are only reported, so that each of the two is a slice.

    Attributes:
        rows: [num_kept], int64: which rows of the group.
        filtered: Those with filters among them.
        filters: Of these, in this order; ``None`` if there are none.
        reported: Those with log-probabilities.
        request: Of these, in this order, with adjustments and temperatures; ``None`` if there are
            none.
    """

    def __init__(
        self,
        filtered: FilteredRows | None,
        reported: ReportedRows | None,
        device: torch.device,
    ) -> None:
        nothing = np.empty(0, dtype=np.int64)
        f = nothing if filtered is None else filtered.index
        r = nothing if reported is None else reported.index
        only_filtered = np.setdiff1d(f, r)
        order = np.concatenate([only_filtered, np.intersect1d(f, r), np.setdiff1d(r, f)])
        self.filtered = slice(0, len(f))
        self.reported = slice(len(only_filtered), len(order))
        places = (
            np.searchsorted(f, order[self.filtered]),
            np.searchsorted(r, order[self.reported]),
        )
        on_device = async_tensor_h2d(np.concatenate([order, *places]), device=device)
        self.rows, in_filters, in_reports = on_device.split([len(order), len(f), len(r)])
        self.filters = None if filtered is None else filtered.filters.rows(in_filters)
        self.request = None if reported is None else reported.rows(in_reports)
