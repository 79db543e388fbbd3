"""A pass's constraints as tensors: built on the host, read by the sampler on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d

from vllm_diffusion.canvas.constraints import CanvasConstraints
from vllm_diffusion.canvas.pass_rows import PassRows

_PIN, _MASK, _RESTART = range(3)


class ConstraintTensors:
    """Constraints of the last pass, at addresses that never change; -1 where a row has none.

    R is the number of slots, N the most rows of a pass.
    """

    def __init__(self, pass_rows: PassRows, vocab_size: int) -> None:
        """Allocate for the largest pass.

        Args:
            pass_rows: The rows of a pass.
            vocab_size: Number of token ids.
        """
        self._pass_rows = pass_rows
        index = pass_rows.index
        R = len(pass_rows.of_slots.num_rows)
        self._rows = torch.full((len(index), 3), -1, dtype=torch.int32, device=index.device)
        # [R, ceil(vocab_size / 32)], int32: a bit for each token that may be drawn in a row.
        self.masks = torch.zeros(R, -(-vocab_size // 32), dtype=torch.int32, device=index.device)

    def pin(self, rows: slice | Tensor) -> Tensor:
        """[num_rows], int32: the only token of each of some rows, or -1."""
        return self._rows[rows, _PIN].contiguous()

    def mask_idx(self, rows: slice | Tensor) -> Tensor:
        """[num_rows], int32: the row of ``masks`` with the tokens that it may draw, or -1."""
        return self._rows[rows, _MASK].contiguous()

    def restart(self, rows: slice | Tensor) -> Tensor:
        """[num_rows], bool: rows whose next step starts without a self-conditioning signal."""
        return self._rows[rows, _RESTART] > 0

    def clear(self) -> None:
        """Lift all constraints, for a pass without any."""
        self._rows.fill_(-1)

    def take(self, message: CanvasConstraints, req_ids: Sequence[str]) -> int:
        """Lay constraints out over the pass's rows and slots.

        Args:
            message: The scheduler's constraints.
            req_ids: Requests of the batch, in its order.

        Returns:
            How many of ``masks`` are used.
        """
        places, starts = self._pass_rows, self._pass_rows.requests.starts
        rows = np.full((places.num_rows, 3), -1, dtype=np.int32)
        num_valid, free_from, free_to = of_slots = np.zeros(
            tuple(places.of_constraints.shape), dtype=np.int32
        )
        num_valid.fill(-1)
        masks: list[np.ndarray] = []
        index = {req_id: i for i, req_id in enumerate(req_ids)}
        for req_id, constraint in zip(
            message.structured_output_request_ids, message.constraints, strict=True
        ):
            i = index.get(req_id)
            if i is None:
                continue
            slot = int(places.requests.slots[i])
            start, end = int(starts[i]), int(starts[i + 1])
            first = start + constraint.num_given
            frontier = min(first + len(constraint.pinned), end)
            rows[first:frontier, _PIN] = constraint.pinned[: frontier - first]
            if constraint.num_valid > 0:
                num_valid[slot] = constraint.num_given + constraint.num_valid
            else:
                num_valid[slot] = 0
            if constraint.frontier_mask is not None and frontier < end:
                rows[frontier, _MASK] = len(masks)
                masks.append(constraint.frontier_mask)
                # The frontier is noise until it is settled.
                free_from[slot], free_to[slot] = frontier - start, frontier - start + 1
            if constraint.restart:
                rows[frontier:end, _RESTART] = 1
                free_from[slot], free_to[slot] = frontier - start, end - start

        async_tensor_h2d(rows, out=self._rows[: len(rows)])
        async_tensor_h2d(of_slots, out=places.of_constraints)
        if masks:
            async_tensor_h2d(np.stack(masks), out=self.masks[: len(masks)])
        return len(masks)
