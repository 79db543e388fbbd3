"""Canvases that are blocks counted from the start of the sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vllm_diffusion.layouts.canvas_layout import CanvasLayout, ScheduledRequest, ScheduledRows


@dataclass(frozen=True)
class AlignedBlock(CanvasLayout):
    """Blocks counted from position 0, in which known tokens attend in both directions too.

    The end of a prompt that fills no block is the head of the first canvas: *given* positions, rows
    of that canvas in each of its passes. All rows of a canvas are draft tokens to the engine.
    """

    summary: ClassVar[str] = "counted from the start; in both directions"
    refused_fields: ClassVar[Mapping[str, str]] = {
        "prompt_logprobs": "(echo with logprobs) is not supported by this model, whose prompt attends "
        "in both directions within its blocks: no position predicts the next one; leave it out."
    }

    @property
    def alignment(self) -> int:
        return self.length

    def attention_problem(self, backend: str, setting: str) -> str | None:
        if backend != "CUSTOM":
            return (
                f"--attention-backend {backend} cannot serve this model, whose known tokens attend "
                f"in both directions within blocks of {self.length}; leave it unset."
            )
        if setting == "cute":
            return (
                'The setting attention="cute" knows no spans of known tokens that attend in both '
                f'directions, as this model\'s blocks of {self.length} do; set attention to "triton".'
            )
        return None

    def warmed_spans(self, has_images: bool) -> tuple[bool, ...]:
        return (True,)

    def allows_width(self, width: int) -> bool:
        return width == self.length

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
            num_rows = num_rows // self.length * self.length
        if to_encode == 0:
            has_canvas = not request.awaits_output
        elif request.is_at_prompt:
            # A pass in flight of a request at its prompt does not affect its canvas.
            has_canvas = request.shares_prompt
        else:
            has_canvas = request.shares_encode
        fits = (
            num_rows == to_encode
            and request.num_computed + num_rows + self.length <= request.max_model_len
            and num_rows + self.length <= request.num_left
        )
        if has_canvas and fits and not request.is_prefilled_only:
            return ScheduledRows(num_rows + self.length, self.length)
        return ScheduledRows(num_rows)

    def row_spans(self, positions: Tensor, spans: Tensor) -> Tensor | None:
        first = positions // self.length * self.length
        spans[:, 0].copy_(first)
        spans[:, 1].copy_(first + self.length)
        return spans

    def num_bidirectional(self, num_canvas: Tensor, is_committed: Callable[[], Tensor]) -> Tensor:
        return num_canvas

    def emitted(self, result: Tensor, num_given: Tensor) -> Tensor:
        # Positions behind the canvas's end hold an arbitrary token of it.
        position = torch.arange(result.shape[-1], device=result.device)[None, :]
        source = position + num_given[:, None]
        return result.gather(-1, source.clamp(max=result.shape[-1] - 1).long())

    def emitted_row(self, row: Tensor, num_given: Callable[[], Tensor], num_rows: int) -> Tensor:
        # The canvas's last rows have none behind them, and nothing reads theirs.
        return (row + num_given()).clamp(max=num_rows - 1)
