"""Statistics of a pass by canvas position, which a rule decides from."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class SlotStatistics(NamedTuple):
    """Statistics of each position of each slot, [R, C], and [R, C, K] of ``choices``.

    The fields are those of :class:`StepInputs`. A slot without rows in the pass has what an earlier
    pass left there, and nothing reads it.
    """

    argmax: Tensor
    candidate: Tensor
    entropy: Tensor
    drawn_confidence: Tensor
    confidence: Tensor | None = None
    choices: Tensor | None = None

    @property
    def num_likeliest(self) -> int:
        """K, likeliest tokens of each position in ``choices``; 0 without them."""
        return 0 if self.choices is None else self.choices.shape[-1]

    @staticmethod
    def zeros(
        num_slots: int, length: int, num_likeliest: int, device: torch.device
    ) -> SlotStatistics:
        """Allocate the statistics of R slots with canvases of C positions.

        Args:
            num_slots: R.
            length: C.
            num_likeliest: K, the likeliest tokens that a rule looks at; 0 if it looks at none.
            device: Where the tensors are.
        """

        def zeros(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros(num_slots, length, *width, dtype=dtype, device=device)

        statistics = SlotStatistics(
            argmax=zeros(torch.int64),
            candidate=zeros(torch.int64),
            entropy=zeros(torch.float32),
            drawn_confidence=zeros(torch.float32),
        )
        if num_likeliest == 0:
            return statistics
        return statistics._replace(
            confidence=zeros(torch.float32), choices=zeros(torch.int64, num_likeliest)
        )
