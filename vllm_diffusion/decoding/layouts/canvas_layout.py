"""Layout of canvases in a request's sequence, as an object that every part of a pass asks.

The scheduler asks which rows to run, the runner where the rows of a pass read their hidden states,
the sampler what each row draws, the step what a canvas emits, and start-up what an engine must be.
A family names its layout; nothing else knows which one it is.

R is the number of request slots, C the canvas length.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from attention_kernels.vocab_statistics import RowDraws

# Numbers of positions: of canvases, an integer tensor, or of one.
Positions = TypeVar("Positions", int, Tensor)


class ScheduledRequest(NamedTuple):
    """State of a request when the scheduler composes a pass.

    Attributes:
        num_prompt: Tokens of its prompt.
        num_tokens: Tokens of the request that are known.
        num_computed: Tokens whose keys and values are in the cache.
        num_uncomputed: Known tokens that are not computed yet.
        num_granted: Rows that the stock scheduler grants the request in this pass.
        num_left: Rows that the pass has left for this request and those after it.
        max_model_len: Tokens of the longest sequence.
        canvas_width: Positions of the request's canvas.
        next_width: Positions of the canvas after that one, if there is one.
        is_at_prompt: True if no canvas of the request has been scheduled yet.
        narrows_later: True if a pass in flight may move on to a last, narrower canvas.
        shares_prompt: True if the pass that ends the prompt may run the canvas after it.
        shares_encode: True if the pass that encodes a finished canvas may run the next one.
    """

    num_prompt: int
    num_tokens: int
    num_computed: int
    num_uncomputed: int
    num_granted: int
    num_left: int
    max_model_len: int
    canvas_width: int
    next_width: int
    is_at_prompt: bool
    narrows_later: bool
    shares_prompt: bool
    shares_encode: bool

    @property
    def room(self) -> int:
        """Positions of the sequence after its known tokens."""
        return self.max_model_len - self.num_computed - self.num_uncomputed


class AnswerSizes(NamedTuple):
    """Sizes that the width of a request's canvases follows from.

    Attributes:
        wanted: Number of positions that the request asks for; ``None`` for the server's.
        num_prompt: Tokens of its prompt.
        num_known: Tokens of it and of its answer so far.
        max_tokens: Tokens of its answer at most.
        block_length: Positions that are denoised at a time.
    """

    wanted: int | None
    num_prompt: int
    num_known: int
    max_tokens: int
    block_length: int


class FirstRows(NamedTuple):
    """Rows of a pass that may draw the first token of the next canvas.

    Attributes:
        committed: Computes [N], bool: rows of canvases that the pass commits.
        last_known: Computes [N], bool: rows of last known tokens, each of which draws the first
            token of the canvas after it.
    """

    committed: Callable[[], Tensor]
    last_known: Callable[[], Tensor]

    def either(self) -> Tensor:
        """[N], bool: the rows of both kinds."""
        return self.committed() | self.last_known()


class ScheduledRows(NamedTuple):
    """Rows of a request in a pass.

    Attributes:
        num_rows: Number of rows, those of a canvas included.
        num_added: Canvas rows among them that the stock scheduler did not grant.
    """

    num_rows: int
    num_added: int = 0


def from_first_free(result: Tensor, num_given: Tensor) -> Tensor:
    """Shift ``result`` to begin at its first position that is not given, [R, C], int64.

    Positions after the canvas's end hold an arbitrary token of it.
    """
    position = torch.arange(result.shape[-1], device=result.device)[None, :]
    source = position + num_given[:, None]
    return result.gather(-1, source.clamp(max=result.shape[-1] - 1).long())


def span_variants(has_spans: bool, has_images: bool) -> list[bool]:
    """Return the variants of the attention kernel that passes launch: with spans, without, or both.

    Args:
        has_spans: True if all known tokens have one: :attr:`CanvasLayout.has_spans`.
        has_images: True if a pass may hold an image, whose tokens attend in both directions.
    """
    if has_spans:
        return [True]
    return [False, True] if has_images else [False]


@dataclass(frozen=True)
class CanvasLayout:
    """Base of layouts; its own answers are those of a free canvas.

    Attributes:
        length: Positions of a canvas, C.
        summary: Place of canvases and attention of the tokens before them, for the documentation.
        refused_fields: Request fields that this layout cannot honour, each with the reason.
        refused_arguments: Names of ``diffusion_*`` arguments, without that prefix, that it cannot
            honour, each with the reason and the remedy.
        draws_first_token: True if the pass that writes the keys and values before a canvas draws
            its first token.
        verifies: True if the commit keeps only the tokens of a canvas that its own rows draw.
        has_spans: True if known tokens attend in both directions within spans: see
            :meth:`row_spans`.
        narrows: True if a request may have canvases of fewer positions.
        predicts_next: True if a row's hidden state predicts the token after it, and not its own.
        recomputes: True if each pass computes all tokens of a request anew: no key or value is
            final before the last token is, so that nothing is cached and no canvas needs a commit.
        crosses_cache_blocks: True if blocks in which known tokens attend in both directions begin
            anywhere in a block of the cache.
        keeps_emitted: True if what a canvas emits stays in it, given, while the rest is denoised.
        has_one_length: True if canvases have C positions, however long the sequence is: graphs are
            captured by their number.
        has_whole_blocks: True if an answer is denoised in blocks of a length that requests set, all
            of them whole.
    """

    length: int

    summary: ClassVar[str] = "where the known tokens end; causal after them"
    refused_fields: ClassVar[Mapping[str, str]] = {}
    refused_arguments: ClassVar[Mapping[str, str]] = {}
    draws_first_token: ClassVar[bool] = False
    verifies: ClassVar[bool] = False
    has_spans: ClassVar[bool] = False
    narrows: ClassVar[bool] = True
    predicts_next: ClassVar[bool] = False
    recomputes: ClassVar[bool] = False
    crosses_cache_blocks: ClassVar[bool] = False
    keeps_emitted: ClassVar[bool] = False
    has_one_length: ClassVar[bool] = True
    has_whole_blocks: ClassVar[bool] = False

    # Start-up.

    @property
    def alignment(self) -> int:
        """Number of tokens of which the model length and KV cache blocks must be multiples."""
        return 1

    # The scheduler.

    def width(self, answer: AnswerSizes) -> int:
        """Return the number of positions of a request's canvases, at most C."""
        return answer.wanted or self.length

    def num_before(self, num_prompt: int, num_generated: int, length: int) -> int:
        """Return how many canvases, or blocks of one, a request has emitted.

        Args:
            num_prompt: Tokens of its prompt.
            num_generated: Tokens of its answer so far.
            length: Positions of each of its canvases or blocks.
        """
        return (self.num_given(num_prompt) + num_generated) // length

    def num_given(self, num_known: int) -> int:
        """Return how many leading positions of the canvas after ``num_known`` tokens are known
        too.
        """
        return 0

    def num_after(self, num_suffix: int) -> int:
        """Return how many positions of a canvas stand after the answer and are not part of it.

        Args:
            num_suffix: Tokens of the request's suffix. A canvas that ends with the answer has them
                pinned at its end.
        """
        return 0

    def rows(self, request: ScheduledRequest) -> ScheduledRows:
        """Return the rows that a request runs in a pass: a canvas whole or not at all."""
        if request.is_at_prompt:
            return self._rows_of_prompt(request)
        return ScheduledRows(self._rows_with_canvas(request))

    def _rows_of_prompt(self, request: ScheduledRequest) -> ScheduledRows:
        """Return the rows of a prompt, and of the canvas after it if the prompt ends with them.

        That canvas depends on no pass in flight, and once a canvas is in flight no token of the
        prompt is left.
        """
        width = min(request.canvas_width, request.room)
        ends = request.num_granted == request.num_uncomputed > 0
        has_room = 0 < width <= request.num_left - request.num_uncomputed
        if ends and request.shares_prompt and has_room:
            return ScheduledRows(request.num_uncomputed + width, width)
        return ScheduledRows(max(min(request.num_granted, request.num_uncomputed), 0))

    def _rows_with_canvas(self, request: ScheduledRequest) -> int:
        """Return the rows of a request that has a canvas after its known tokens."""
        num_granted, num_uncomputed = request.num_granted, request.num_uncomputed
        if num_granted <= num_uncomputed:
            return num_granted if num_uncomputed else 0
        # A canvas that the model length cuts waits for the pass that may narrow it.
        if request.room < request.canvas_width and request.narrows_later:
            return 0
        is_whole = num_granted - num_uncomputed >= min(request.canvas_width, request.room)
        if num_uncomputed == 0:
            return num_granted if is_whole else 0
        return num_granted if is_whole and request.shares_encode else num_uncomputed

    # The rows of a pass.

    def row_spans(
        self, positions: Tensor, spans: Tensor, num_known: Callable[[], Tensor]
    ) -> Tensor | None:
        """Write the span in which each known token attends in both directions.

        Args:
            positions: [num_tokens], positions in the sequence.
            spans: [num_tokens, 2], int32, output.
            num_known: Computes [num_tokens], int: tokens of the prompt of each row's request, and
                what it had generated when it was preempted.

        Returns:
            ``spans``; ``None`` if known tokens are causal.
        """
        return None

    def num_sampled(
        self, num_canvas: np.ndarray, num_known: np.ndarray, block_length: np.ndarray
    ) -> np.ndarray:
        """Return how many canvas rows of each request are projected onto the vocabulary, [n],
        int64.

        Args:
            num_canvas: [n], canvas rows of each request.
            num_known: [n], tokens of its prompt, and what it had generated when it was preempted.
            block_length: [n], positions that are denoised at a time.
        """
        return num_canvas

    def first_sampled(self, num_given: Positions) -> Positions:
        """Return the first position of each canvas with a sampled row, in the type of
        ``num_given``.

        Args:
            num_given: Given positions of each canvas, or of one.
        """
        return 0 * num_given

    def num_bidirectional(self, num_canvas: Tensor, is_committed: Callable[[], Tensor]) -> Tensor:
        """Return the number of rows of each request that attend in both directions, [R], int32.

        Args:
            num_canvas: [R], int32, canvas rows of each request.
            is_committed: Computes [R], bool: requests whose canvas is being committed.
        """
        return torch.where(is_committed(), 0, num_canvas)

    def shift(self, position: Tensor, first: FirstRows) -> Tensor:
        """Return how many positions after each sampled row the token stands that it draws, [N],
        int.

        A token that stands at the end of a canvas or after it is the next canvas's first one.

        Args:
            position: [N], int, position of each row in its canvas; 0 where it is ``last_known``.
            first: Which of the rows draw such a token.
        """
        return torch.zeros_like(position)

    def drafted(self, position: Tensor) -> Tensor:
        """Tell which rows of canvases in their step draft tokens for a later pass to verify, [N],
        bool: those on which a LoRA of drafts acts.

        Args:
            position: [N], int, position of each row in its canvas.
        """
        return torch.zeros_like(position, dtype=torch.bool)

    def predicting_position(self, num_final: Tensor) -> Tensor:
        """Return the position of a committed canvas whose row draws the next one's first token,
        [R], int.

        Args:
            num_final: [R], int32: result of :meth:`num_final`.

        Returns:
            Any position if canvases begin as noise: see :attr:`draws_first_token`.
        """
        return torch.zeros_like(num_final)

    # The sampler.

    def draws(self, draws: RowDraws, first: FirstRows, drawn_at: Callable[[], Tensor]) -> RowDraws:
        """Return the temperatures and noise keys of the rows of a pass.

        Args:
            draws: Values for N rows of canvases.
            first: Which of the rows draw the first token of the next canvas.
            drawn_at: Computes [N], int64: position in its sequence of the token that each row
                draws.
        """
        return draws

    # The step.

    def num_final(self, canvas: Tensor, drawn: Tensor, num_rows: Tensor) -> Tensor:
        """Return the number of leading positions of each canvas that its commit emits, [R], int32.

        Args:
            canvas: [R, C], int64, tokens of each canvas.
            drawn: [R, C], int64, token that each row draws.
            num_rows: [R], int32, rows of each canvas.
        """
        return num_rows

    def emitted(self, result: Tensor, num_given: Tensor) -> Tensor:
        """Shift ``result`` to begin at its first position that is not given, [R, C], int64.

        Args:
            result: [R, C], int64, tokens of each canvas.
            num_given: [R], int32, given positions of each canvas.
        """
        return result


class FreeCanvas(CanvasLayout):
    """Canvases that begin where the known tokens end, after causal ones."""
