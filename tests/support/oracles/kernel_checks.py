"""The visibility rule as a mask, FlashAttention-4's order of key tiles, and counters."""

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention_kernels.canvas_attention import Window
from attention_kernels.canvas_attention.reference import _visible, causal_spans, row_bounds


def visibility_mask(
    query_len: int,
    seq_len: int,
    causal_rows: int,
    window: Window = Window(),  # noqa: B008 (frozen)
    *,
    row_spans: Tensor | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Compute which keys each query row of one sequence sees, bool ``[query_len, seq_len]``.

    Args:
        query_len: Query rows; they are the last of the ``seq_len`` keys.
        seq_len: Keys of the sequence.
        causal_rows: Leading query rows that attend causally; the rest is the canvas.
        window: Window of keys that a row sees around its anchor.
        row_spans: [query_len, 2], key interval of the image that a row lies in.
        device: Device of the mask.
    """
    lower, upper = row_bounds(query_len, seq_len, causal_rows, window, device)
    spans = None if row_spans is None else causal_spans(row_spans, seq_len, causal_rows)
    return _visible(lower, upper, spans, 0, seq_len)


def walk_key_tiles(
    first: int, end: int, cut: int, whole: int, has_left: bool
) -> list[tuple[int, bool]]:
    """List (key tile, true if it is masked) in the order of FlashAttention-4's loops.

    Args:
        first: First key tile to visit.
        end: One past the last.
        cut: From this tile on, some row may not see a tile's end.
        whole: From this tile on, every row sees a tile's start.
        has_left: True if there is a window on the left.

    Returns:
        The tiles from the last to the first: one masked tile, masked tiles down to ``cut``,
        unmasked tiles down to ``whole`` and, with a left window, masked tiles to the end.
    """
    tiles = [(end - 1, True)]
    remaining = end - 1
    tiles += [(tile, True) for tile in range(remaining - 1, cut - 1, -1)]
    remaining = min(remaining, cut)
    tiles += [(tile, False) for tile in range(remaining - 1, whole - 1, -1)]
    if has_left:
        remaining = min(remaining, whole)
        tiles += [(tile, True) for tile in range(remaining - 1, first - 1, -1)]
    return tiles


class Operations(TorchDispatchMode):
    """Counts operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class TensorMemory(TorchDispatchMode):
    """Bytes of the tensors that are alive at once, counted from every operation inside it.

    What an operation allocates and frees within itself is not seen.

    Attributes:
        peak: Most bytes of such tensors alive after an operation.
        largest_float32: Elements of the largest float32 tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.largest_float32 = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        # Some entries of ``_alive`` may be dead by now.
        self._at_most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = {
            leaf.untyped_storage()._cdata
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if not isinstance(leaf, torch.Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in given:
                self._add(storage)
                if leaf.dtype == torch.float32:
                    self.largest_float32 = max(self.largest_float32, leaf.numel())
        if self._at_most > self.peak:
            self._forget_dead()
            self.peak = max(self.peak, self._at_most)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        # A dead one may have been at the same address.
        _, before = self._alive.get(storage._cdata, (None, 0))
        self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._at_most += storage.nbytes() - before

    def _forget_dead(self) -> None:
        self._alive = {key: (ref, n) for key, (ref, n) in self._alive.items() if not ref.expired()}
        self._at_most = sum(n for _, n in self._alive.values())
