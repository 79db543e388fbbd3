"""How canvases lie in a request's sequence, as an object that every part of a pass asks.

The scheduler asks which rows to run, the runner where the rows of a pass read their hidden states,
the sampler what each row draws, the step what a canvas emits, and start-up what an engine must be.
A family names its layout; nothing else knows which one it is.

R is the number of request slots, C the canvas length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from attention_kernels.vocab_statistics import RowDraws


class RequestRows(NamedTuple):
    """A request as the scheduler finds it when it composes a pass.

    Attributes:
        num_tokens: Tokens of the request that are known.
        num_computed: Tokens whose keys and values are in the cache.
        num_known: Known tokens that are not computed yet.
        num_granted: Rows that the stock scheduler grants the request in this pass.
        num_left: Rows that the pass has left for this request and those after it.
        max_model_len: Tokens of the longest sequence.
        canvas_width: Positions of the request's canvas.
        is_at_prompt: Whether no canvas of the request has been scheduled yet.
        is_prefilled_only: Whether the request ends with its prompt.
        awaits_output: Whether a pass in flight decides what the next canvas is.
        narrows_later: Whether a pass in flight may move on to a last, narrower canvas.
        shares_prompt: Whether the pass that ends the prompt may run the canvas behind it.
        shares_commit: Whether the pass that encodes a finished canvas may run the next one.
    """

    num_tokens: int
    num_computed: int
    num_known: int
    num_granted: int
    num_left: int
    max_model_len: int
    canvas_width: int
    is_at_prompt: bool
    is_prefilled_only: bool
    awaits_output: bool
    narrows_later: bool
    shares_prompt: bool
    shares_commit: bool

    @property
    def room(self) -> int:
        """Positions of the sequence behind its known tokens."""
        return self.max_model_len - self.num_computed - self.num_known


class SampledRows(Protocol):
    """The rows of a pass that are sampled, N of them. Each property is computed when it is read.

    Attributes:
        committed: [N], bool: rows of canvases that the pass commits.
        seeding: [N], bool: rows of known tokens behind which a canvas begins.
        at: [N], int64: where in its sequence each row stands.
    """

    @property
    def committed(self) -> Tensor: ...

    @property
    def seeding(self) -> Tensor: ...

    @property
    def at(self) -> Tensor: ...


class ScheduledRows(NamedTuple):
    """A request's part of a pass.

    Attributes:
        num_rows: Its rows, those of a canvas included.
        num_added: Canvas rows among them that the stock scheduler does not know of.
    """

    num_rows: int
    num_added: int = 0


@dataclass(frozen=True)
class CanvasLayout:
    """One way in which canvases lie; what a subclass does not answer is a free canvas's answer.

    Attributes:
        length: C, positions of a canvas.
        summary: Where canvases lie and how the tokens before them attend, for the documentation.
        refused_fields: Request fields that this layout cannot honour, each with the reason.
        refused_arguments: The same for ``diffusion_*`` arguments.
    """

    length: int

    summary: ClassVar[str] = "where the known tokens end; causal behind them"
    refused_fields: ClassVar[Mapping[str, str]] = {}
    refused_arguments: ClassVar[Mapping[str, str]] = {}

    # Start-up.

    @property
    def alignment(self) -> int:
        """Tokens of which the model length and blocks of the KV cache must be a multiple."""
        return 1

    @property
    def starts_from_commit(self) -> bool:
        """Whether a canvas needs the pass that writes the keys and values before it."""
        return False

    @property
    def verifies(self) -> bool:
        """Whether the commit keeps of a canvas only what its own rows draw."""
        return False

    def attention_problem(self, backend: str, setting: str) -> str | None:
        """Why an attention back end cannot serve this layout, in a sentence; ``None`` if it can.

        Args:
            backend: Its name in vLLM; ``"CUSTOM"`` is this package's.
            setting: The operator's ``attention``.
        """
        return None

    def warmed_spans(self, has_images: bool) -> tuple[bool, ...]:
        """Variants of the attention kernel that passes launch: without spans, with spans, or both.

        Args:
            has_images: Whether a pass may hold an image, whose tokens attend in both directions.
        """
        return (False, True) if has_images else (False,)

    def allows_width(self, width: int) -> bool:
        """Whether a request may have canvases of ``width`` positions, at most C."""
        return True

    # The scheduler.

    def num_given(self, num_known: int) -> int:
        """Leading positions of the canvas behind ``num_known`` known tokens that are known too."""
        return 0

    def rows(self, request: RequestRows) -> ScheduledRows:
        """Rows that a request runs in a pass: a canvas whole or not at all."""
        known = max(min(request.num_granted, request.num_known), 0)
        if request.is_prefilled_only:
            return ScheduledRows(min(request.num_granted, request.num_known))
        if request.is_at_prompt:
            return self._rows_of_prompt(request, known)
        if request.awaits_output:
            return ScheduledRows(known)
        return ScheduledRows(self._rows_with_canvas(request))

    def _rows_of_prompt(self, request: RequestRows, known: int) -> ScheduledRows:
        """Rows of a prompt, and of the canvas behind it if the prompt ends with them.

        Nothing that is in flight decides what that canvas is. A canvas that is in flight itself
        leaves no token of the prompt.
        """
        width = min(request.canvas_width, request.room)
        ends = request.num_granted == request.num_known > 0
        has_room = 0 < width <= request.num_left - request.num_known
        if ends and request.shares_prompt and has_room:
            return ScheduledRows(request.num_known + width, width)
        return ScheduledRows(known)

    def _rows_with_canvas(self, request: RequestRows) -> int:
        """Rows of a request that has a canvas behind its known tokens."""
        num_granted, num_known = request.num_granted, request.num_known
        if num_granted <= num_known:
            return num_granted if num_known else 0
        # A canvas that the model length cuts is as wide as it will ever be.
        if request.room < request.canvas_width and request.narrows_later:
            return 0
        is_whole = num_granted - num_known >= min(request.canvas_width, request.room)
        if num_known == 0:
            return num_granted if is_whole else 0
        return num_granted if is_whole and request.shares_commit else num_known

    # The rows of a pass.

    def row_spans(self, positions: Tensor, spans: Tensor) -> Tensor | None:
        """[num_tokens, 2], int32: the span in which each known token attends in both directions.

        Args:
            positions: [num_tokens], of the sequence.
            spans: [num_tokens, 2], int32, where they are written.

        Returns:
            ``spans``; ``None`` where known tokens are causal.
        """
        return None

    def num_bidirectional(self, num_canvas: Tensor, is_committed: Callable[[], Tensor]) -> Tensor:
        """[R], int32: rows of each request that attend in both directions.

        Args:
            num_canvas: [R], int32, canvas rows of each request.
            is_committed: Computes [R], bool: requests whose canvas is being committed.
        """
        return torch.where(is_committed(), 0, num_canvas)

    def seeding(self, ends_known: np.ndarray) -> np.ndarray | None:
        """Requests whose last known row is sampled for the first token of their canvas.

        Args:
            ends_known: [num_reqs], bool: requests whose known tokens end in this pass, and which
                have no canvas in it.

        Returns:
            [num_reqs], bool; ``None`` if there are none.
        """
        return None

    def hidden_index(self, index: Tensor) -> Tensor:
        """[N], int64: the tensor that holds where the hidden state of each sampled row is.

        Args:
            index: [N], int64, where each sampled row is.
        """
        return index

    def hidden_at(self, at: Tensor, position: Tensor, is_seed: Callable[[], Tensor]) -> Tensor:
        """[N], int: the row whose hidden state tells what stands at a sampled row.

        Args:
            at: [N], int, the sampled rows.
            position: [N], int32, each one's position in its canvas.
            is_seed: Computes [N], bool: rows that tell a canvas's first token.

        Returns:
            ``at`` itself where each row tells its own token.
        """
        return at

    # The sampler.

    def drawn_at(self, rows: SampledRows) -> Tensor:
        """[N], int64: where in its sequence the token stands that each row draws."""
        return rows.at

    def draws(self, draws: RowDraws, rows: SampledRows) -> RowDraws:
        """Temperatures and noise keys of the rows of a pass.

        Args:
            draws: What they are for rows of canvases.
            rows: The rows.
        """
        return draws

    def reports_unscaled(self, reports_raw: bool) -> bool:
        """Whether log-probabilities are reported at temperature 1 for every request.

        Args:
            reports_raw: Whether the server reports them before penalties and filters.
        """
        return False

    # The step.

    def num_final(self, canvas: Tensor, drawn: Tensor, num_rows: Tensor) -> Tensor:
        """[R], int32: leading positions of each canvas that its commit emits.

        Args:
            canvas: [R, C], int64.
            drawn: [R, C], int64, by each row.
            num_rows: [R], int32, rows of each canvas.
        """
        return num_rows

    def emitted(self, result: Tensor, num_given: Tensor) -> Tensor:
        """[R, C], int64: ``result`` from its first position that is not given on.

        Args:
            result: [R, C], int64.
            num_given: [R], int32.
        """
        return result

    def first_token(self, drawn: Tensor, committed: Tensor, num_final: Tensor) -> Tensor | None:
        """[R], int64: the first token of canvases that begin now; ``None`` where they begin as noise.

        Args:
            drawn: [R, C], int64, by each row.
            committed: [R], bool: slots whose last canvas this pass commits.
            num_final: [R], int32: see :meth:`num_final`.
        """
        return None

    # Log-probabilities.

    def reporting_row(self, row: Tensor, position: Tensor) -> Tensor:
        """[N], int64: the row whose log-probabilities are those of the token at each row.

        Args:
            row: [N], int64, from 0 on.
            position: [N], int64, each one's position in its canvas.
        """
        return row

    def is_given(self, unwritten: Tensor, position: Tensor, is_pinned: Tensor) -> Tensor:
        """[N], bool: rows whose token was given, by the prompt or by the request.

        Args:
            unwritten: [N], bool: rows whose position no step ever wrote.
            position: [N], int64, each one's position in its canvas.
            is_pinned: [N], bool: rows whose token the request holds in place.
        """
        return unwritten

    def was_reported(self, position: Tensor, is_seed: Tensor, is_decided: Tensor) -> Tensor:
        """[N], bool: rows whose log-probabilities an earlier pass computed.

        Args:
            position: [N], int64.
            is_seed: [N], bool: rows of known tokens behind which a canvas begins.
            is_decided: [N], bool: rows whose token an earlier step decided.
        """
        return is_decided

    def seed_row(self, first: Tensor, num_rows: Tensor, num_final: Tensor) -> Tensor | None:
        """[n], int64: the row of each canvas that tells the first token of the canvas behind it.

        Args:
            first: [n], int64, the first row of each canvas in the pass.
            num_rows: [n], int64, its rows.
            num_final: [n], int32, how many of its positions the pass made final.

        Returns:
            ``None`` where canvases begin as noise.
        """
        return None


class FreeCanvas(CanvasLayout):
    """Canvases that begin where the known tokens end, behind causal ones."""
