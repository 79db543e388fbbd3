"""Keys that a row sees, and key tiles that a query tile visits, as plain arithmetic.

Every expression is made of ``+ - * //`` and the two functions a caller hands in, so that the same
lines run on host integers, on torch tensors and on the device integers that the CuTe DSL traces.
That is how the visibility that the kernels compute is tested without a GPU, against the mask of
``reference.py``.

Legend: a sequence has ``seq_len`` keys, its ``query_len`` rows are the last of them, and the first
``causal_rows`` of these are causal. A window of None is open.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from attention_kernels.canvas_attention.splits import MIN_SPLIT_KEYS


@dataclass(frozen=True)
class Visibility:
    """Keys of one sequence that its rows see.

    Args:
        query_len: Query rows of the sequence.
        seq_len: Keys of the sequence.
        causal_rows: Leading rows that attend causally.
        window_left: Keys seen before the anchor, or None.
        window_right: Keys that a canvas row sees after itself, or None.
        canvas_anchor: True if the window of a canvas row is tied to the start of the canvas; false
            if it is tied to the row.
        minimum: Returns the smaller of two values of the type in use.
        maximum: Returns the larger of them.
    """

    query_len: Any
    seq_len: Any
    causal_rows: Any
    window_left: Any
    window_right: Any
    canvas_anchor: bool
    minimum: Callable[[Any, Any], Any] = min
    maximum: Callable[[Any, Any], Any] = max

    def lower(self, row: Any) -> Any:
        """Return the first key that a row sees; never falls from one row to the next."""
        if self.window_left is None:
            return 0
        # A causal row lies before the canvas, so this leaves its own position as its anchor.
        anchor = self.minimum(row, self.causal_rows) if self.canvas_anchor else row
        return self.maximum(self.seq_len - self.query_len + anchor - self.window_left, 0)

    def upper(self, row: Any) -> Any:
        """One past the last key that a row sees; never falls from one row to the next."""
        # 0 on causal rows and 1 on canvas rows: a choice that needs no branch.
        on_canvas = self.minimum(self.maximum(row - self.causal_rows + 1, 0), 1)
        right = self.seq_len if self.window_right is None else self.window_right
        end = self.seq_len - self.query_len + row + 1 + on_canvas * right
        return self.maximum(self.minimum(end, self.seq_len), 0)

    def tile_rows(self, tile: Any, tile_m: int, group: int) -> tuple[Any, Any]:
        """First and last live row of a query tile of ``tile_m`` (row, head of a group) pairs."""
        first = tile * tile_m // group
        return first, self.minimum((tile * tile_m + tile_m - 1) // group, self.query_len - 1)

    def visited(self, tile: Any, tile_m: int, tile_n: int, group: int) -> tuple[Any, Any]:
        """Return the half-open range of key tiles that some row of a query tile sees part of.

        Holds at least one tile, which the kernels always load: a row that sees nothing is hidden
        from all of it and gives zeros.
        """
        first, last = self.tile_rows(tile, tile_m, group)
        start = self.lower(first) // tile_n
        end = (self.upper(last) + tile_n - 1) // tile_n
        return start, self.maximum(end, start + 1)

    def live_splits(self, num_splits: Any) -> Any:
        """Return how many of the launched splits the sequence uses: none too short, at least one.

        The programs of the other splits do nothing, and their output is never read.
        """
        keys = self.maximum(self.seq_len, 1)
        return self.minimum((keys + MIN_SPLIT_KEYS - 1) // MIN_SPLIT_KEYS, num_splits)

    def visited_in_split(
        self, tile: Any, tile_m: int, tile_n: int, group: int, split: Any, num_splits: Any
    ) -> tuple[Any, Any]:
        """Return the part of ``visited`` that one of ``num_splits`` walks; about even.

        Empty, its end not after its start, in a split that the sequence does not use, and in some
        of a tile with fewer key tiles than the sequence has splits.
        """
        start, end = self.visited(tile, tile_m, tile_n, group)
        live = self.live_splits(num_splits)
        share = (end - start + live - 1) // live
        first = start + split * share
        return first, self.minimum(first + share, end)

    def first_cut_right(self, tile: Any, tile_m: int, tile_n: int, group: int) -> Any:
        """From this key tile on, some row of the query tile may not see the tile's last key."""
        first, _ = self.tile_rows(tile, tile_m, group)
        return self.upper(first) // tile_n

    def first_whole_left(self, tile: Any, tile_m: int, tile_n: int, group: int) -> Any:
        """From this key tile on, every row of the query tile sees the tile's first key."""
        _, last = self.tile_rows(tile, tile_m, group)
        return (self.lower(last) + tile_n - 1) // tile_n
