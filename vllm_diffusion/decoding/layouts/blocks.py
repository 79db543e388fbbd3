"""Layouts of canvases that are blocks: counted from the start, after a first token, or drafts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attention_kernels.vocab_statistics import RowDraws
from vllm_diffusion.decoding.layouts.canvas_layout import (
    AnswerSizes,
    CanvasLayout,
    FirstRows,
    ScheduledRequest,
    ScheduledRows,
    from_first_free,
)


@dataclass(frozen=True)
class AlignedBlock(CanvasLayout):
    """Blocks counted from position 0, in which known tokens attend in both directions too.

    The end of a prompt that fills no block is the head of the first canvas: *given* positions, rows
    of that canvas in each of its passes. All rows of a canvas are draft tokens to the engine.
    """

    summary: ClassVar[str] = "counted from the start; in both directions"
    has_spans = True
    narrows = False
    refused_fields: ClassVar[Mapping[str, str]] = {
        "prompt_logprobs": "(echo with logprobs) is not supported by this model, whose prompt attends "
        "in both directions within its blocks: no position predicts the next one; leave it out."
    }

    @property
    def alignment(self) -> int:
        return self.length

    def num_given(self, num_known: int) -> int:
        return num_known % self.length

    def rows(self, request: ScheduledRequest) -> ScheduledRows:
        """Schedule whole blocks, of known tokens or of a canvas.

        Known tokens that do not fill a block are rows of the canvas, and computed in each of its
        passes: the stock scheduler does not count them.
        """
        to_encode = max(request.num_uncomputed - self.num_given(request.num_tokens), 0)
        num_rows = min(request.num_granted, to_encode, request.num_left)
        if num_rows < to_encode:
            num_rows = self._whole_blocks(request, num_rows)
        if to_encode == 0:
            has_canvas = True
        elif request.is_at_prompt:
            # A pass in flight of a request at its prompt does not affect its canvas.
            has_canvas = request.shares_prompt
        else:
            has_canvas = request.shares_encode
        width = self._canvas_rows(request)
        if request.narrows_later and request.next_width < width:
            # The pass in flight may emit this canvas.
            has_canvas = False
        fits = (
            num_rows == to_encode
            and request.num_computed + num_rows + width <= request.max_model_len
            and num_rows + width <= request.num_left
        )
        if has_canvas and fits:
            return ScheduledRows(num_rows + width, width)
        return ScheduledRows(num_rows)

    def _whole_blocks(self, request: ScheduledRequest, num_rows: int) -> int:
        """Return the rows of known tokens, at most ``num_rows``, that end with a block."""
        return num_rows // self.length * self.length

    def _canvas_rows(self, request: ScheduledRequest) -> int:
        """Return the rows of the canvas after the known tokens."""
        return self.length

    def row_spans(
        self, positions: Tensor, spans: Tensor, num_known: Callable[[], Tensor]
    ) -> Tensor | None:
        first = positions // self.length * self.length
        spans[:, 0].copy_(first)
        spans[:, 1].copy_(first + self.length)
        return spans

    def num_bidirectional(self, num_canvas: Tensor, is_committed: Callable[[], Tensor]) -> Tensor:
        return num_canvas

    def emitted(self, result: Tensor, num_given: Tensor) -> Tensor:
        return from_first_free(result, num_given)


@dataclass(frozen=True)
class BlockAfterPrompt(AlignedBlock):
    """Blocks counted from the end of the prompt, so that its first block is the short one.

    Keys and values of a prompt depend on its length, so that prompts share a prefix only if their
    lengths leave the same remainder. The last block is as short as what is left of the answer.
    """

    summary: ClassVar[str] = "counted from the end of the prompt; in both directions"
    crosses_cache_blocks = True

    @property
    def alignment(self) -> int:
        return 1

    def width(self, answer: AnswerSizes) -> int:
        left = answer.num_prompt + answer.max_tokens - answer.num_known
        return max(min(self.length, left), 1)

    def num_given(self, num_known: int) -> int:
        return 0

    def _whole_blocks(self, request: ScheduledRequest, num_rows: int) -> int:
        first = request.num_prompt % self.length
        end = request.num_computed + num_rows
        end = first + (end - first) // self.length * self.length if end >= first else 0
        return max(end - request.num_computed, 0)

    def _canvas_rows(self, request: ScheduledRequest) -> int:
        return request.canvas_width

    def row_spans(
        self, positions: Tensor, spans: Tensor, num_known: Callable[[], Tensor]
    ) -> Tensor | None:
        # What was generated before a preemption are whole blocks.
        origin = num_known() % self.length
        first = (positions - origin) // self.length * self.length + origin
        spans[:, 0].copy_(first.clamp(min=0))
        spans[:, 1].copy_(first + self.length)
        return spans


def _first_token_draws(draws: RowDraws, first: FirstRows, length: int) -> RowDraws:
    """Set the noise keys of first tokens: step 0 of the canvas, at a position after its end."""
    is_first = first.either()
    return draws._replace(
        canvas_idx=draws.canvas_idx + first.committed().to(torch.int32),
        step=torch.where(is_first, 0, draws.step),
        position=torch.where(is_first, length, draws.position),
    )


@dataclass(frozen=True)
class FirstTokenBlock(CanvasLayout):
    """Layout of canvases after causal tokens, of which the last row predicts the first token.

    The pass that commits a canvas is causal too, and its last row predicts the first token of the
    next canvas. So no canvas shares a pass with the tokens before it.
    """

    summary: ClassVar[str] = f"{CanvasLayout.summary}; the first token from the encoding pass"
    draws_first_token = True

    def shift(self, position: Tensor, first: FirstRows) -> Tensor:
        return first.either().to(position.dtype)

    def predicting_position(self, num_final: Tensor) -> Tensor:
        return (num_final - 1).clamp(min=0)

    def draws(self, draws: RowDraws, first: FirstRows, drawn_at: Callable[[], Tensor]) -> RowDraws:
        return _first_token_draws(draws, first, self.length)


@dataclass(frozen=True)
class ShiftedBlock(AlignedBlock):
    """Layout of aligned blocks whose rows predict the token after them.

    A position's token comes from the row before it. A block's first position needs no row, since
    its token is the likeliest one after the previous block. So the block's last row, which nothing
    else of the block reads, takes its place and predicts the next block's first token.
    """

    summary: ClassVar[str] = (
        f"{AlignedBlock.summary}; the first token from the encoding pass; rows shifted by one"
    )

    draws_first_token = True
    predicts_next = True

    def shift(self, position: Tensor, first: FirstRows) -> Tensor:
        return torch.where(first.last_known(), 1, torch.where(position == 0, self.length, 0))

    def predicting_position(self, num_final: Tensor) -> Tensor:
        return torch.zeros_like(num_final)

    def draws(self, draws: RowDraws, first: FirstRows, drawn_at: Callable[[], Tensor]) -> RowDraws:
        is_first = first.either()
        scale = torch.where(is_first, 0.0, draws.request_temperature)
        draws = draws._replace(request_temperature=scale)
        return _first_token_draws(draws, first, self.length)


_ALL_AT_ONCE = (
    "is not supported by this server's rule, which verifies a draft's tokens all at once; leave it out, "
    'or serve with rule "autoregressive".'
)
_NO_TOKEN = "is not supported by this server's rule, whose drafts change no token of an answer; leave it out."


@dataclass(frozen=True)
class VerifiedDraft(FirstTokenBlock):
    """Layout of drafts after a certain first token; each row of a commit draws the next token.

    Tokens are those of drawing one after another, so their noise is keyed by the position in the
    sequence, however the answer was cut into canvases. Drafts are greedy.
    """

    verifies = True
    # Each changes a token's distribution by the tokens before it, which a draft's rows do not have
    # yet.
    refused_fields: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "bad_words",
            "structured_outputs",
            "thinking_token_budget",
        ),
        _ALL_AT_ONCE,
    )

    refused_arguments: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            "max_steps",
            "seed_canvas",
            "pinned",
            "suffix",
            "prediction",
            "read_only",
            "constrained",
        ),
        _NO_TOKEN,
    )

    def draws(self, draws: RowDraws, first: FirstRows, drawn_at: Callable[[], Tensor]) -> RowDraws:
        is_first = first.either()
        zero = torch.zeros_like(draws.step)
        return draws._replace(
            request_temperature=torch.where(is_first, draws.request_temperature, 0.0),
            canvas_idx=zero,
            step=zero,
            position=drawn_at().to(torch.int32),
        )

    def drafted(self, position: Tensor) -> Tensor:
        return torch.ones_like(position, dtype=torch.bool)

    def num_final(self, canvas: Tensor, drawn: Tensor, num_rows: Tensor) -> Tensor:
        """Return the number of leading tokens that the causal pass draws too, [R], int32.

        The first token is always kept; row i draws the token at i + 1. The number is 1 without
        rows.
        """
        position = torch.arange(1, canvas.shape[-1], device=canvas.device)
        agrees = (canvas[:, 1:] == drawn[:, :-1]) & (position < num_rows[:, None])
        agreed = agrees.to(torch.int32).cumprod(dim=-1, dtype=torch.int32)
        return 1 + agreed.sum(-1, dtype=torch.int32)


@dataclass(frozen=True)
class CausalDraft(VerifiedDraft):
    """Layout of drafts by causal rows, each of which predicts the token after it.

    So the certain first token's own row draws the second token as without any draft: that one is
    kept too. A draft's noise is that of the pass that verifies it, where a row that saw the same
    tokens draws the same one: the more alike two distributions are, the more often they agree.
    """

    summary: ClassVar[str] = "where the known tokens end; causal"
    predicts_next = True

    def num_bidirectional(self, num_canvas: Tensor, is_committed: Callable[[], Tensor]) -> Tensor:
        return torch.zeros_like(num_canvas)

    def shift(self, position: Tensor, first: FirstRows) -> Tensor:
        # No row is before that of the first position, whose token is certain.
        return (first.either() | (position == 0)).to(position.dtype)

    def drafted(self, position: Tensor) -> Tensor:
        return position > 0

    def draws(self, draws: RowDraws, first: FirstRows, drawn_at: Callable[[], Tensor]) -> RowDraws:
        drawn = super().draws(draws, first, drawn_at)
        return drawn._replace(request_temperature=draws.request_temperature)
