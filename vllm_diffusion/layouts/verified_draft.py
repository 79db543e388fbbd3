"""Layout of canvases that are drafts, of which a causal pass keeps the tokens that it draws too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attention_kernels.vocab_statistics import RowDraws
from vllm_diffusion.layouts.canvas_layout import SampledRows
from vllm_diffusion.layouts.seeded_block import SeededBlock

_ALL_AT_ONCE = (
    "is not supported by this server's rule, which verifies a draft's tokens all at once; leave it out, "
    'or serve with rule "autoregressive".'
)
_ONE_STEP = (
    "is not supported by this server's rule, whose drafts are made in one step and change no token of "
    "an answer; leave it out."
)


@dataclass(frozen=True)
class VerifiedDraft(SeededBlock):
    """Layout of drafts behind a certain first token; each row of a commit draws the next token.

    Tokens are those of drawing one after another, so their noise is keyed by the position in the
    sequence, however the answer was cut into canvases. Drafts are greedy.
    """

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
            "read_only",
            "constrained",
        ),
        _ONE_STEP,
    )

    @property
    def verifies(self) -> bool:
        return True

    def draws(self, draws: RowDraws, rows: SampledRows) -> RowDraws:
        is_seed = rows.committed | rows.seeding
        zero = torch.zeros_like(draws.step)
        return draws._replace(
            request_temperature=torch.where(is_seed, draws.request_temperature, 0.0),
            canvas_idx=zero,
            step=zero,
            position=self.drawn_at(rows).to(torch.int32),
        )

    def reports_unscaled(self, reports_raw: bool) -> bool:
        # An autoregressive server reports them so.
        return reports_raw

    def num_final(self, canvas: Tensor, drawn: Tensor, num_rows: Tensor) -> Tensor:
        """Return the number of leading tokens that the causal pass draws too, [R], int32.

        The first token is always kept; row i draws the token at i + 1. The number is 1 without
        rows.
        """
        position = torch.arange(1, canvas.shape[-1], device=canvas.device)
        agrees = (canvas[:, 1:] == drawn[:, :-1]) & (position < num_rows[:, None])
        agreed = agrees.to(torch.int32).cumprod(dim=-1, dtype=torch.int32)
        return 1 + agreed.sum(-1, dtype=torch.int32)

    def reporting_row(self, position: Tensor) -> Tensor:
        # The row before drew the token, but a canvas's first one.
        return torch.arange(len(position), device=position.device) - (position > 0).long()

    def was_reported(self, position: Tensor, is_seed: Tensor, is_decided: Tensor) -> Tensor:
        # A canvas's first token was drawn behind the canvas before.
        return (position == 0) & ~is_seed

    def seed_row(self, first: Tensor, num_rows: Tensor, num_final: Tensor) -> Tensor:
        return first + (num_final - 1).clamp(min=0)
