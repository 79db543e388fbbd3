"""The public functions: check the arguments, choose an implementation, call it."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attention_kernels.vocab_statistics import reference
from attention_kernels.vocab_statistics.logits import RowLogits
from attention_kernels.vocab_statistics.running import FilteredDraw, RowDraws, RunningStatistics
from attention_kernels.vocab_statistics.search import Piece, Weigh, search

Impl = Literal["auto", "reference", "triton"]


def update_statistics(
    running: RunningStatistics,
    rows: RowLogits,
    draws: RowDraws,
    *,
    weights: Tensor | None = None,
    product: Tensor | None = None,
    impl: Impl = "auto",
) -> None:
    """Add one tile of the vocabulary to each row's statistics.

    The logits of a row need never be whole: a caller projects a tile, calls this, and projects the
    next over it. What comes out depends on the tiles' order (ascending, for ties) but not on where
    they are cut, up to the rounding of the sums; the noise of an id depends on neither.

    Args:
        running: Statistics of the previous tiles, updated in place.
        rows: Logits of the tile. Their ``first_id`` is a multiple of 4.
        draws: Temperatures and keys of the rows.
        weights: [num_rows, num_ids], floating point: filled with exp(x - maximum), x being the
            logits over the schedule's temperature and the maximum that after this tile.
        product: [num_rows, any], float32: sums of the weights of earlier tiles times something,
            brought down to the new maximum in place.
        impl: ``"auto"``, ``"reference"`` or ``"triton"``. Only ``"auto"`` chooses: Triton for
            tensors on a GPU.

    Raises:
        ValueError: If shapes, ``first_id`` or ``impl`` are wrong.

    Source: the online softmax of arXiv:1805.02867, with the entropy's sum carried along.
    """
    num_rows = running.maximum.shape[0]
    implementation = _checked(impl, rows, num_rows)
    if weights is not None and weights.shape != rows.projected.shape:
        raise ValueError(
            f"weights is {list(weights.shape)}; it must be {list(rows.projected.shape)}."
        )
    if product is not None and (product.shape[0] != num_rows or product.dtype != torch.float32):
        raise ValueError(
            f"product is {product.dtype} {list(product.shape)}; it must be float32 and have "
            f"{num_rows} rows."
        )
    if rows.projected.numel() > 0:
        implementation.update_statistics(running, rows, draws, weights, product)


def add_product(
    product: Tensor, weights: Tensor, embedding: Tensor, *, impl: Impl = "auto"
) -> None:
    """Add ``weights @ embedding`` to ``product``, by PyTorch's product; the reference adds in
    float32.

    Args:
        product: [num_rows, hidden_size], float32.
        weights: [num_rows, num_ids], in the dtype of ``embedding``.
        embedding: [num_ids, hidden_size].
        impl: ``"reference"``, or another for what is fastest.

    Raises:
        ValueError: If shapes, dtypes or ``impl`` are wrong.
    """
    shape = [weights.shape[0], embedding.shape[1]]
    if list(product.shape) != shape or product.dtype != torch.float32:
        raise ValueError(
            f"product is {product.dtype} {list(product.shape)}; it must be float32 {shape}."
        )
    if embedding.shape[0] != weights.shape[1] or embedding.dtype != weights.dtype:
        raise ValueError(
            f"embedding is {embedding.dtype} {list(embedding.shape)}; it must be {weights.dtype} "
            f"and have {weights.shape[1]} rows."
        )
    if weights.is_cuda and weights.dtype != torch.float32 and impl != "reference":
        # Added by the product itself, which leaves the sums in memory once.
        torch.addmm(product, weights, embedding, out_dtype=torch.float32, out=product)
    else:
        product.addmm_(weights.float(), embedding.float())


def scaled_logits(rows: RowLogits, divisor: Tensor, *, impl: Impl = "auto") -> Tensor:
    """Compute capped and adjusted logits over a divisor.

    Args:
        rows: A few rows with all their ids, since these are in float32.
        divisor: [num_rows], float32, above 0.
        impl: Implementation, as in :func:`update_statistics`.

    Returns:
        [num_rows, num_ids], float32.

    Raises:
        ValueError: If shapes or ``impl`` are wrong.
    """
    scaled: Tensor = _checked(impl, rows, divisor.shape[0]).scaled_logits(rows, divisor)
    return scaled


def largest_logit(rows: RowLogits, divisor: Tensor, *, impl: Impl = "auto") -> Tensor:
    """[num_rows], float32: the largest that :func:`scaled_logits` would return, or minus infinity.

    Arguments and errors as there; any number of rows.
    """
    implementation = _checked(impl, rows, divisor.shape[0])
    if rows.projected.numel() == 0:
        return torch.full_like(divisor, float("-inf"))
    largest: Tensor = implementation.largest_logit(rows, divisor)
    return largest


def largest_logits(rows: RowLogits, divisor: Tensor, num: int, *, impl: Impl = "auto") -> Tensor:
    """[num_rows, num], float32: the largest that :func:`scaled_logits` would return, descending,
    and minus infinity where there are fewer.

    Arguments and errors as there; any number of rows. PyTorch chooses them, whatever scaled them.
    """
    scaled = _checked(impl, rows, divisor.shape[0]).scaled_logits
    return reference.largest_logits(rows, divisor, num, scaled)


def weigh(
    rows: RowLogits,
    divisor: Tensor,
    maximum: Tensor,
    pivots: Tensor,
    bounds: Tensor,
    *,
    by_mass: bool,
    impl: Impl = "auto",
) -> Tensor:
    """Sum the weights of the ids whose logits reach each of some pivots.

    Weights are integers, so that no order in which they are added changes a sum.

    Args:
        rows: Kept rows, with all their ids.
        divisor: [num_rows], float32, above 0.
        maximum: [num_rows], float32: largest of the scaled logits.
        pivots: [num_rows, num_pivots], int64, ascending: keys (:func:`ordered_keys`). The number
            of pivots is a power of two.
        bounds: [num_rows, 2], int64: only keys at or above the first and below the second count;
            no pivot is below the first. Where they are neighbours or equal the row is settled, and
            its weights mean nothing.
        by_mass: True if an id's weight is its probability relative to the maximum, in units of
            1 / ``MASS_SCALE``; otherwise it is 1.
        impl: Implementation, as in :func:`update_statistics`.

    Returns:
        [num_rows, num_pivots], int64.

    Raises:
        ValueError: If shapes or ``impl`` are wrong.
    """
    implementation = _checked(impl, rows, divisor.shape[0])
    num_pivots = pivots.shape[1]
    if num_pivots & (num_pivots - 1):
        raise ValueError(f"There are {num_pivots} pivots; their number must be a power of two.")
    if rows.projected.numel() == 0:
        return torch.zeros_like(pivots)
    weights: Tensor = implementation.weigh(rows, divisor, maximum, pivots, bounds, by_mass)
    return weights


def largest_key(
    weigh: Weigh, wanted: Tensor, maximum: Tensor, active: Tensor, *, impl: Impl = "auto"
) -> Tensor:
    """Return the largest key such that the ids at or above it weigh enough.

    Args:
        weigh: Sweeps over the rows.
        wanted: [num_rows], int64, at least 1: what is enough.
        maximum: [num_rows], float32, the largest logit of each row.
        active: [num_rows], bool: rows that are searched.
        impl: Implementation, as in :func:`update_statistics`.

    Returns:
        [num_rows], int64: ``LEAST_KEY`` where even all ids are too few, and in rows that are not
        active.

    Raises:
        ValueError: If ``impl`` is wrong.
    """
    narrow = _implementation(impl, wanted).narrow
    return search(weigh, narrow, Piece.below(maximum, active), wanted)


def draw(
    rows: RowLogits,
    divisor: Tensor,
    maximum: Tensor,
    keys: Tensor,
    draws: RowDraws,
    *,
    impl: Impl = "auto",
) -> FilteredDraw:
    """Draw by Gumbel-max among the ids whose logits reach a threshold, and sum their mass.

    Args:
        rows: Kept rows. Their ``first_id`` is a multiple of 4.
        divisor: [num_rows], float32, above 0.
        maximum: [num_rows], float32: largest of the scaled logits, of all ranks.
        keys: [num_rows], int64: the thresholds, as keys (:func:`ordered_keys`).
        draws: Keys of the noise.
        impl: Implementation, as in :func:`update_statistics`.

    Raises:
        ValueError: If shapes, ``first_id`` or ``impl`` are wrong.
    """
    implementation = _checked(impl, rows, divisor.shape[0])
    if rows.projected.numel() == 0:
        nothing = torch.full_like(divisor, float("-inf"))
        return FilteredDraw(nothing, torch.zeros_like(keys), nothing, torch.zeros_like(divisor))
    result: FilteredDraw = implementation.draw(rows, divisor, maximum, keys, draws)
    return result


def _checked(impl: Impl, rows: RowLogits, num_rows: int) -> Any:
    """Check the rows, and return the module that holds their implementation."""
    projected = rows.projected
    if (
        projected.dim() != 2
        or projected.shape[0] != num_rows
        or not projected.dtype.is_floating_point
    ):
        raise ValueError(
            f"projected is {projected.dtype} {list(projected.shape)}; it must be "
            f"[{num_rows}, num_ids] of a floating-point type."
        )
    if rows.first_id % 4 or rows.first_id < 0:
        # One counter of the generator serves four ids.
        raise ValueError(f"first_id={rows.first_id} must be a multiple of 4.")
    return _implementation(impl, projected)


def _implementation(impl: Impl, tensor: Tensor) -> Any:
    """Return the module that holds an implementation, which may be chosen by a tensor's device."""
    if impl not in get_args(Impl):
        raise ValueError(f"impl={impl!r} is not one of {', '.join(get_args(Impl))}.")
    if impl == "triton" or (impl == "auto" and tensor.is_cuda):
        from attention_kernels.vocab_statistics import triton

        return triton
    return reference
