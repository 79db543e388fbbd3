"""The outcome of a pass for a canvas, as one row of integers that a worker sends to the scheduler."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm_diffusion.canvas.step import StepOutput

_NUMBERS = 7


class CanvasView:
    """A canvas after a pass, read from its row of :func:`pack`. P is its number of positions that are no known tokens.

    Attributes:
        denoised: True if the pass was a step of it.
        done: True if that was its last one.
        step: Steps that it has taken, this one among them.
        max_steps: The step cap.
        num_emitted: Tokens of it that the pass emitted; 0 before it is done.
        began_from: [num_rows], int32, what the pass began from, known tokens first.
        tokens: [P], int32, what it would commit.
        kept: [P], bool, positions that enter the next step, or are committed, as they are.
        decided_step: [P], int32, the step that last wrote each position: 1 is the first, 0 the pass
            before it.
        entropy: [P], float32, nats.
    """

    def __init__(self, row: np.ndarray) -> None:
        """Name the parts of a row.

        Args:
            row: [7 + 5 * C], int32, on the host.
        """
        numbers = row[:_NUMBERS].tolist()
        denoised, done, self.step, self.max_steps, num_rows, num_given, self.num_emitted = numbers
        self.denoised, self.done = bool(denoised), bool(done)
        began_from, tokens, kept, decided_step, entropy = row[_NUMBERS:].reshape(5, -1)
        # The tokens begin with the first that is not known; the rest begins with the canvas.
        of_canvas = slice(num_given, num_rows)
        self.began_from: np.ndarray = began_from[:num_rows]
        self.tokens: np.ndarray = tokens[: max(num_rows - num_given, 0)]
        self.kept = kept[of_canvas].astype(bool)
        self.decided_step: np.ndarray = decided_step[of_canvas]
        self.entropy: np.ndarray = entropy[of_canvas].view(np.float32)


def pack(
    output: StepOutput,
    began_from: Tensor,
    num_rows: Tensor,
    max_steps: Tensor,
    entropy: Tensor,
    slot: Tensor,
) -> Tensor:
    """Pack the canvases of some slots into rows for :class:`CanvasView`.

    Args:
        output: Outcome of the pass.
        began_from: [R, C], int64, the canvases before it.
        num_rows: [R], int32, canvas rows of each slot in it.
        max_steps: [R], int32.
        entropy: [R, C], float32.
        slot: [n], int64.

    Returns:
        [n, 7 + 5 * C], int32.
    """
    numbers = (
        output.denoised,
        output.done,
        output.step,
        max_steps,
        num_rows,
        output.num_given,
        output.num_emitted,
    )
    positions = (
        began_from,
        output.tokens,
        output.kept,
        output.decided_step,
        entropy.view(torch.int32),
    )
    return torch.cat(
        [
            torch.stack([number[slot].to(torch.int32) for number in numbers], dim=1),
            *(values[slot].to(torch.int32) for values in positions),
        ],
        dim=1,
    )
