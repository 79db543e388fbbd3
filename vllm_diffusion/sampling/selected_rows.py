"""Some of the sampled rows of a pass, with the slots and positions that they are of."""

from torch import Tensor

from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.decoding.layouts import CanvasLayout, FirstRows


class SelectedRows:
    """Some of the sampled rows of the pass.

    Attributes:
        rows: Which of the sampled rows they are: the first ones, or [n], int64.
        slot: [n], int64, their slots.
        position: [n], int64, their positions in their canvases.
    """

    def __init__(self, rows: slice | Tensor, pass_rows: PassRows, num_computed: Tensor) -> None:
        """Select rows.

        Args:
            rows: Which of the sampled rows.
            pass_rows: The rows of the pass.
            num_computed: [R], int32, tokens of each slot before the pass.
        """
        self.rows = rows
        self.slot = pass_rows.slot[rows]
        self.position = pass_rows.position[rows]
        self._slots = pass_rows.slots
        self._pass_rows = pass_rows
        self._num_computed = num_computed

    @property
    def first_rows(self) -> FirstRows:
        """Which of the rows draw the first token of the next canvas."""
        return FirstRows(
            lambda: self._slots.draws_next_first[self.slot],
            lambda: self._pass_rows.of_slots.last_known[self.slot],
        )

    def drawn_at(self) -> Tensor:
        """[n], int64: position in its sequence of the token that each row draws."""
        way = self._slots.way
        return way.choose(lambda way: way.layout, self.drawn_at_in, self.slot)

    def drawn_at_in(self, layout: CanvasLayout) -> Tensor:
        """[n], int64: the same if canvases are of a layout."""
        at = self._num_computed[self.slot] + self._pass_rows.offset[self.rows]
        if not layout.draws_first_token:
            return at
        return at + layout.shift(self.position, self.first_rows)
