"""Settings of the canvas rows of a pass, and the rows that are looked at more than once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from attention_kernels.vocab_statistics import LogitAdjustments, RowDraws
from vllm_diffusion.sampling.candidate_filters import CandidateFilters
from vllm_diffusion.sampling.logprobs import LogprobsRequest


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
