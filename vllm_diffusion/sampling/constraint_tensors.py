"""A pass's constraints as tensors: built on the host, read by the sampler on the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_diffusion.canvas.constraints import CanvasConstraints


@dataclass(frozen=True)
class ConstraintTensors:
    """Of one pass. R is the number of slots.

    Attributes:
        pin: [num_rows], int32: the only token of a row, or -1.
        restart: [num_rows], bool: rows whose next step starts without a self-conditioning signal.
        mask_idx: [num_rows], int32: which of ``masks`` says what may be drawn in a row, or -1.
        masks: [num_masks, ceil(vocab_size / 32)], int32: a bit for each of those tokens.
        num_valid: [R], int32: leading positions that a step must repeat to be the last; 0 where no
            step may be the last yet, -1 without a constraint.
        free_from: [R], int32: first position that becomes noise whatever the rule says.
        free_to: [R], int32: the position after the last such one.
    """

    pin: Tensor
    restart: Tensor
    mask_idx: Tensor
    masks: Tensor
    num_valid: Tensor
    free_from: Tensor
    free_to: Tensor

    @staticmethod
    def build(
        message: CanvasConstraints, input_batch: InputBatch, num_slots: int, device: torch.device
    ) -> ConstraintTensors:
        """Lay the constraints out over the batch's canvas rows and slots."""
        starts = input_batch.cu_num_logits_np
        num_rows = int(starts[input_batch.num_reqs])
        pin, mask_idx = (np.full(num_rows, -1, dtype=np.int32) for _ in range(2))
        restart = np.zeros(num_rows, dtype=bool)
        num_valid = np.full(num_slots, -1, dtype=np.int32)
        free_from, free_to = (np.zeros(num_slots, dtype=np.int32) for _ in range(2))
        masks: list[np.ndarray] = []
        index = {req_id: i for i, req_id in enumerate(input_batch.req_ids)}
        for req_id, constraint in zip(
            message.structured_output_request_ids, message.constraints, strict=True
        ):
            i = index.get(req_id)
            if i is None:
                continue
            slot = int(input_batch.idx_mapping_np[i])
            start, end = int(starts[i]), int(starts[i + 1])
            first = start + constraint.num_given
            frontier = min(first + len(constraint.pinned), end)
            pin[first:frontier] = constraint.pinned[: frontier - first]
            if constraint.num_valid > 0:
                num_valid[slot] = constraint.num_given + constraint.num_valid
            else:
                num_valid[slot] = 0
            if constraint.frontier_mask is not None and frontier < end:
                mask_idx[frontier] = len(masks)
                masks.append(constraint.frontier_mask)
                # The frontier is noise until it is settled.
                free_from[slot], free_to[slot] = frontier - start, frontier - start + 1
            if constraint.restart:
                restart[frontier:end] = True
                free_from[slot], free_to[slot] = frontier - start, end - start

        def to_device(array: np.ndarray) -> Tensor:
            return async_tensor_h2d(array, device=device)

        return ConstraintTensors(
            to_device(pin),
            to_device(restart),
            to_device(mask_idx),
            to_device(np.stack(masks) if masks else np.empty((0, 1), np.int32)),
            to_device(num_valid),
            to_device(free_from),
            to_device(free_to),
        )
