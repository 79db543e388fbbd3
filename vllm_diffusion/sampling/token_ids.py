"""A request's list of token ids, where both the host and the device need it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d


@dataclass(frozen=True)
class TokenIds:
    """Ascending token ids, on the host to cut tiles from and on the device to index with."""

    on_host: np.ndarray
    on_device: Tensor

    @staticmethod
    def of(ids: Iterable[int], device: torch.device) -> TokenIds:
        array = np.array(sorted(set(ids)), dtype=np.int64)
        return TokenIds(array, async_tensor_h2d(array, device=device))

    def within(self, first_id: int, num_ids: int) -> slice:
        """Which of them lie in a tile."""
        low, high = np.searchsorted(self.on_host, (first_id, first_id + num_ids))
        return slice(int(low), int(high))
