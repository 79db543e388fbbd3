"""Canvases whose first token comes from the pass that writes the keys and values before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from attention_kernels.vocab_statistics import RowDraws
from vllm_diffusion.layouts.aligned_block import AlignedBlock
from vllm_diffusion.layouts.canvas_layout import CanvasLayout, SampledRows


def _seeding(ends_known: np.ndarray) -> np.ndarray | None:
    """Return the requests whose known tokens end in a pass; ``None`` if there are none."""
    return ends_known if ends_known.any() else None


def _given(unwritten: Tensor, position: Tensor, is_pinned: Tensor) -> Tensor:
    """Return the rows of given tokens; a first token was drawn before its canvas's first step."""
    return unwritten & ((position > 0) | is_pinned)


def _seeds(draws: RowDraws, rows: SampledRows, length: int) -> RowDraws:
    """Set the noise keys of first tokens: step 0 of the canvas, at a position behind its end."""
    committed = rows.committed
    is_seed = committed | rows.seeding
    return draws._replace(
        canvas_idx=draws.canvas_idx + committed.to(torch.int32),
        step=torch.where(is_seed, 0, draws.step),
        position=torch.where(is_seed, length, draws.position),
    )


@dataclass(frozen=True)
class SeededBlock(CanvasLayout):
    """Layout of canvases behind causal tokens, whose last row predicts the first token, the *seed*.

    The pass that commits a canvas is causal too, and its last row predicts the next canvas's seed.
    So no canvas shares a pass with the tokens before it.
    """

    summary: ClassVar[str] = f"{CanvasLayout.summary}; the first token from the encoding pass"

    @property
    def starts_from_commit(self) -> bool:
        return True

    def seeding(self, ends_known: np.ndarray) -> np.ndarray | None:
        return _seeding(ends_known)

    def drawn_at(self, rows: SampledRows) -> Tensor:
        at = rows.at
        return at + (rows.committed | rows.seeding).to(at.dtype)

    def draws(self, draws: RowDraws, rows: SampledRows) -> RowDraws:
        return _seeds(draws, rows, self.length)

    def first_token(self, drawn: Tensor, committed: Tensor, num_final: Tensor) -> Tensor | None:
        last = (num_final - 1).clamp(min=0).long()[:, None]
        behind = drawn.gather(-1, last)[:, 0]
        return torch.where(committed, behind, drawn[:, 0])

    def is_given(self, unwritten: Tensor, position: Tensor, is_pinned: Tensor) -> Tensor:
        return _given(unwritten, position, is_pinned)

    def seed_row(self, first: Tensor, num_rows: Tensor, num_final: Tensor) -> Tensor:
        return first + num_rows - 1


@dataclass(frozen=True)
class ShiftedBlock(AlignedBlock):
    """Layout of aligned blocks whose rows predict the token behind them.

    A position's token comes from the row before it. A block's first position needs no row, since
    its token is the likeliest one behind the previous block. So the block's last row, which nothing
    else of the block reads, takes its place and predicts the next block's first token.
    """

    summary: ClassVar[str] = (
        f"{AlignedBlock.summary}; the first token from the encoding pass; rows shifted by one"
    )

    @property
    def starts_from_commit(self) -> bool:
        return True

    def seeding(self, ends_known: np.ndarray) -> np.ndarray | None:
        return _seeding(ends_known)

    def hidden_index(self, index: Tensor) -> Tensor:
        return torch.zeros_like(index)

    def hidden_at(self, at: Tensor, position: Tensor, is_seed: Callable[[], Tensor]) -> Tensor:
        before = torch.where(position == 0, at + self.length - 1, at - 1)
        return torch.where(is_seed(), at, before)

    def drawn_at(self, rows: SampledRows) -> Tensor:
        return rows.at + 1

    def draws(self, draws: RowDraws, rows: SampledRows) -> RowDraws:
        is_seed = rows.committed | rows.seeding
        scale = torch.where(is_seed, 0.0, draws.request_temperature)
        return _seeds(draws._replace(request_temperature=scale), rows, self.length)

    def first_token(self, drawn: Tensor, committed: Tensor, num_final: Tensor) -> Tensor | None:
        return drawn[:, 0]

    def is_given(self, unwritten: Tensor, position: Tensor, is_pinned: Tensor) -> Tensor:
        return _given(unwritten, position, is_pinned)

    def seed_row(self, first: Tensor, num_rows: Tensor, num_final: Tensor) -> Tensor:
        return first
