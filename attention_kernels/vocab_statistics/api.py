"""The public function: check the arguments, choose an implementation, call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from attention_kernels.vocab_statistics.reference import update_statistics_reference
from attention_kernels.vocab_statistics.running import RowDraws, RunningStatistics

Impl = Literal["auto", "reference", "triton"]
__all__ = ["Impl", "RowDraws", "RunningStatistics", "update_statistics"]


def update_statistics(
    running: RunningStatistics,
    logits: Tensor,
    first_id: int,
    draws: RowDraws,
    *,
    softcap: float | None = None,
    weights: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """Take one tile of the vocabulary into each row's statistics.

    The logits of a row are never whole: a caller projects a tile, calls this, and projects the
    next over it. What comes out depends on the tiles' order (ascending, for ties) but not on where
    they are cut, up to the rounding of the sums; the noise of an id depends on neither.

    Args:
        running: Of the tiles before, updated in place.
        logits: [num_rows, num_ids], floating point: of ids ``first_id`` and on. An id at minus
            infinity is impossible.
        first_id: A multiple of 4.
        draws: Temperatures and keys of the rows.
        softcap: Logits become ``softcap * tanh(logit / softcap)`` in float32 first.
        weights: [num_rows, num_ids], floating point: filled with exp(x - maximum), x being the
            logits over the schedule's temperature and the maximum that after this tile.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``. Only ``"auto"`` chooses: Triton for
            tensors on a GPU.

    Returns:
        [num_rows], float32: what sums of earlier weights are to be multiplied by.

    Raises:
        ValueError: If shapes, ``first_id`` or ``impl`` are wrong.

    Source: the online softmax of arXiv:1805.02867, with the entropy's sum carried along.
    """
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r} is not one of {', '.join(get_args(Impl))}.")
    num_rows = running.maximum.shape[0]
    if logits.dim() != 2 or logits.shape[0] != num_rows or not logits.dtype.is_floating_point:
        raise ValueError(
            f"logits is {logits.dtype} {list(logits.shape)}; it must be [{num_rows}, num_ids] of a "
            "floating-point type."
        )
    if weights is not None and weights.shape != logits.shape:
        raise ValueError(f"weights is {list(weights.shape)}; it must be {list(logits.shape)}.")
    if first_id % 4 or first_id < 0:
        # One counter of the generator serves four ids.
        raise ValueError(f"first_id={first_id} must be a multiple of 4.")
    if logits.numel() == 0:
        return torch.ones_like(running.maximum)
    return _implementation(impl, logits)(running, logits, first_id, draws, softcap, weights)


def _implementation(impl: Impl, logits: Tensor) -> Callable[..., Tensor]:
    if impl == "triton" or (impl == "auto" and logits.is_cuda):
        from attention_kernels.vocab_statistics.triton import update_statistics_triton

        return update_statistics_triton
    return update_statistics_reference
