"""Rows behind which a canvas begins, where the pass over known tokens gives its first token.

The engine has rows of canvases projected. These are one more for each request whose known tokens end
in the pass: to the sampler they are a canvas of one row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import InputBatch


def seeding_requests(input_batch: InputBatch) -> np.ndarray | None:
    """[num_reqs], bool: requests that have known tokens alone in the pass, up to the last of them.

    A finished canvas that the token budget cuts counts with each of its parts: the last one's row
    is read before a canvas is. ``None`` if there are none.
    """
    n = input_batch.num_reqs
    num_computed = input_batch.num_computed_prefill_tokens_np[:n]
    is_at_end = (
        num_computed + input_batch.num_scheduled_tokens[:n] >= input_batch.prefill_len_np[:n]
    )
    has_canvas = np.diff(input_batch.cu_num_logits_np[: n + 1]) > 0
    seeding: np.ndarray = is_at_end & ~has_canvas
    return seeding if seeding.any() else None


def with_seed_rows(
    input_batch: InputBatch, canvas_index: Tensor, seeding: np.ndarray
) -> InputBatch:
    """The batch with a row more for each of these requests.

    Args:
        input_batch: The batch that ran.
        canvas_index: [num_canvas_rows], int64: where in the pass the rows of canvases are.
        seeding: [num_reqs], bool, requests without canvas rows.
    """
    n, device = input_batch.num_reqs, canvas_index.device
    num_canvas_rows = np.diff(input_batch.cu_num_logits_np[: n + 1])
    num_rows = num_canvas_rows + seeding
    starts = np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int32)
    is_seed = np.repeat(seeding, num_rows)
    # Rows of canvases come from the device; of the others the last of the request.
    source = np.zeros(len(is_seed), dtype=np.int64)
    source[~is_seed] = np.arange(len(canvas_index))
    source[is_seed] = len(canvas_index) + np.arange(int(seeding.sum()))
    ends = input_batch.query_start_loc_np[1 : n + 1].astype(np.int64) - 1

    def to_device(array: np.ndarray) -> Tensor:
        return async_tensor_h2d(array, device=device)

    candidates = torch.cat([canvas_index, to_device(ends[seeding])])
    position = np.concatenate([np.arange(count) for count in num_rows]).astype(np.int32)
    slots = np.repeat(input_batch.idx_mapping_np[:n], num_rows)
    return replace(
        input_batch,
        logits_indices=candidates[to_device(source)],
        cu_num_logits=to_device(starts),
        cu_num_logits_np=starts,
        expanded_idx_mapping=to_device(slots.astype(np.int32)),
        expanded_local_pos=to_device(position),
    )
