"""Layout of models that attend over prompt and answer in both directions: one canvas holds the
sequence.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from vllm_diffusion.decoding.layouts.canvas_layout import (
    AnswerSizes,
    CanvasLayout,
    Positions,
    ScheduledRequest,
    ScheduledRows,
    from_first_free,
)

_WHOLE = (
    "is not supported by this model, whose canvas is the prompt and its whole answer; leave it out."
)


@dataclass(frozen=True)
class WholeSequence(CanvasLayout):
    """A canvas begins at position 0 and holds all tokens, of which the known ones are given.

    Every pass runs every row, since each key and value depends on all tokens: none is final before
    the last token is, so that nothing is cached. The answer is cut into blocks, of which the first
    one that has masks is denoised, and the last one ends with the answer. A block is emitted when
    it is decided, and stays in the canvas.
    """

    summary: ClassVar[str] = "the whole sequence, in both directions; nothing is cached"
    recomputes = True
    keeps_emitted = True
    has_one_length = False
    narrows = False
    refused_fields: ClassVar[Mapping[str, str]] = {
        "prompt_logprobs": "(echo with logprobs) is not supported by this model, which attends in both "
        "directions: no position of the prompt predicts the next one; leave it out."
    }
    refused_arguments: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("canvas_length", "seed_canvas", "pinned", "read_only", "constrained"), _WHOLE
    )

    def width(self, answer: AnswerSizes) -> int:
        return min(answer.num_prompt + answer.max_tokens, self.length)

    def num_before(self, num_prompt: int, num_generated: int, length: int) -> int:
        return num_generated // length

    def num_given(self, num_known: int) -> int:
        return num_known

    def rows(self, request: ScheduledRequest) -> ScheduledRows:
        """Schedule the whole sequence; the stock scheduler grants the known tokens of it."""
        width = request.canvas_width
        return ScheduledRows(width, width) if width <= request.num_left else ScheduledRows(0)

    def num_bidirectional(self, num_canvas: Tensor, is_committed: Callable[[], Tensor]) -> Tensor:
        return num_canvas

    def num_sampled(
        self, num_canvas: np.ndarray, num_known: np.ndarray, block_length: np.ndarray
    ) -> np.ndarray:
        return np.clip(num_canvas - num_known, 0, block_length)

    def num_after(self, num_suffix: int) -> int:
        return num_suffix

    def first_sampled(self, num_given: Positions) -> Positions:
        return num_given

    def emitted(self, result: Tensor, num_given: Tensor) -> Tensor:
        return from_first_free(result, num_given)


@dataclass(frozen=True)
class ShiftedSequence(WholeSequence):
    """A whole sequence in which a position's token comes from the row before it."""

    summary: ClassVar[str] = f"{WholeSequence.summary}; rows shifted by one"
    predicts_next = True


@dataclass(frozen=True)
class SequenceOfBlocks(WholeSequence):
    """A whole sequence whose answer has whole blocks, of which a request gets its tokens, where
    there is room for them.
    """

    summary: ClassVar[str] = f"{WholeSequence.summary}; whole blocks"
    has_whole_blocks = True

    def width(self, answer: AnswerSizes) -> int:
        blocks = -(-answer.max_tokens // answer.block_length)
        whole = answer.num_prompt + blocks * answer.block_length
        return whole if whole <= self.length else super().width(answer)


@dataclass(frozen=True)
class GrowingSequence(SequenceOfBlocks):
    """A whole sequence without the blocks after the one that is denoised."""

    summary: ClassVar[str] = f"{WholeSequence.summary}; no masks after the block"
    refused_arguments: ClassVar[Mapping[str, str]] = {
        **WholeSequence.refused_arguments,
        "suffix": "is not supported by this model, which has nothing after the block that it writes; leave it out.",
    }

    def width(self, answer: AnswerSizes) -> int:
        return min(super().width(answer), answer.num_known + answer.block_length)
