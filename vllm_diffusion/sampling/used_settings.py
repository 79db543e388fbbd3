"""What a pass uses besides temperatures and seeds, known on the host: nothing else is read."""

from dataclasses import dataclass

import numpy as np

from vllm_diffusion.sampling.candidate_filters import CandidateFilters


@dataclass(frozen=True)
class UsedSettings:
    """Settings beyond temperatures and seeds that a pass uses, known on the host.

    Attributes:
        lists: Lists of adjustments: of requests with a bias, allowed tokens or a least number of
            tokens.
        penalties: True if some request has a penalty.
        pins: True if there are constraints.
        num_masks: How many of their masks are used.
        filtered: [num_filtered], int64, ascending: rows with filters, or whose margin is judged;
            ``None`` if there are none.
        filters: [R] each, filters that some of these rows have.
        reported: [num_reported], int64, ascending: rows with log-probabilities; ``None`` if there
            are none.
        num_top: Most likeliest tokens that one of these rows reports.
        num_named: Most ids that one of their requests names to be reported.
        reads_some: True if some read-only canvas reports a few ids alone.
        reports_pinned: True if pinned positions may be among the reported rows.
        allowed_ids: The only ids that some row may draw or report; ``None`` for all.
        read: [num_read], int64, ascending: the only rows that the step reads; ``None`` for all.
        has_next_step: False if no canvas of the pass takes another step, and needs nothing for it.
    """

    lists: tuple[int, ...] = ()
    penalties: bool = False
    pins: bool = False
    num_masks: int = 0
    filtered: np.ndarray | None = None
    filters: CandidateFilters = CandidateFilters(None, None, None)
    reported: np.ndarray | None = None
    num_top: int = 0
    num_named: int = 0
    reads_some: bool = False
    reports_pinned: bool = False
    allowed_ids: frozenset[int] | None = None
    read: np.ndarray | None = None
    has_next_step: bool = True

    @property
    def adjusts(self) -> bool:
        """True if some row draws from adjusted logits."""
        return bool(self.lists) or self.penalties or self.pins

    @property
    def is_plain(self) -> bool:
        """True if the pass uses temperatures and seeds only, and takes all that a step may read."""
        uses_none = not self.adjusts and self.filtered is None and self.reported is None
        return uses_none and self.has_next_step and self.read is None

    @property
    def needs_less(self) -> bool:
        """True if the pass needs less than all ids or rows, or nothing for a next step."""
        is_less = self.allowed_ids is not None or self.read is not None
        return is_less or not self.has_next_step
