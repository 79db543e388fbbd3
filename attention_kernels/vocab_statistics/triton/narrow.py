"""Step between two sweeps of a search for thresholds, as one launch.

PyTorch takes some twenty launches for it, of a few numbers each, and a search has nine.
"""

# Device code is typed by its DSL: only its compile-time arguments carry annotations.
# mypy: allow-incomplete-defs

import triton
import triton.language as tl
from torch import Tensor

from attention_kernels.vocab_statistics.search import Piece


@triton.jit
def _narrow_kernel(
    bounds_ptr,
    pivots_ptr,
    settled_ptr,
    weights_ptr,
    wanted_ptr,
    P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    low, high = tl.load(bounds_ptr + 2 * row), tl.load(bounds_ptr + 2 * row + 1)
    settled = tl.load(settled_ptr + row)
    pivot = tl.arange(0, P)
    pivots = tl.load(pivots_ptr + row * P + pivot)
    weights = tl.load(weights_ptr + row * P + pivot) + settled
    # Weights fall as pivots rise: the leading ones are enough.
    enough = tl.sum((weights >= tl.load(wanted_ptr + row)).to(tl.int32), axis=0)
    if enough > 0:
        low = tl.sum(tl.where(pivot == enough - 1, pivots, 0), axis=0)
    if enough < P:
        high = tl.sum(tl.where(pivot == enough, pivots, 0), axis=0)
        settled = tl.sum(tl.where(pivot == enough, weights, 0), axis=0)
    tl.store(bounds_ptr + 2 * row, low)
    tl.store(bounds_ptr + 2 * row + 1, high)
    tl.store(settled_ptr + row, settled)
    tl.store(pivots_ptr + row * P + pivot, low + (high - low) * (pivot + 1) // (P + 1))


def narrow(piece: Piece, weights: Tensor, wanted: Tensor) -> None:
    bounds, pivots, settled = piece
    _narrow_kernel[(len(bounds),)](
        bounds, pivots, settled, weights, wanted, P=pivots.shape[1], num_warps=1
    )
