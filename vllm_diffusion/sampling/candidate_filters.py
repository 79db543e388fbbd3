"""Top-k, top-p and min-p of the candidate's distribution, without ever sorting a row.

Each of them keeps the tokens whose logit is at least a threshold of the row. The threshold is
searched for: a sweep counts what lies above each of some pivots, and the next one divides the piece
that holds it. Counts and masses are integers, so no number of ranks changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.vocab_statistics import (
    LEAST_KEY,
    RowLogits,
    largest_key,
    ordered_keys,
    weigh,
)
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
