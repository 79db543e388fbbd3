"""Rule that drafts a whole canvas in one step, of which a causal pass keeps a verified prefix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vllm_diffusion.decoding.rule import DecodingRule, StepDecision, StepInputs, as_drawn


class LinearSpec(DecodingRule):
    """Draft a canvas behind its first token, which is certain; the pass that commits it verifies it.

    A draft is the likeliest token of every position, in one step. Then a causal pass over the canvas
    draws, in each row, the token behind it, as without any draft. Drafted tokens are kept up to the
    first that differs from the drawn one, and the token drawn there begins the next canvas. So the
    tokens are those of drawing one after another: the draft decides only how many come at once.

    Source: ``linear_spec_generate`` of nvidia/Nemotron-Labs-Diffusion with ``threshold=0``. It differs:
    a draft is greedy at any temperature, and a first token that is the mask token stays, where that code
    drafts over it and so leaves the law of drawing one after another.
    """

    settings = {}
    refused_settings = {"max_denoising_steps": "whose drafts take one step"}

    def temperatures(
        self,
        settings: Mapping[str, Tensor],
        step: Tensor,
        max_steps: Tensor,
        requested: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return as_drawn(requested)

    def decide(
        self, inputs: StepInputs, settings: Mapping[str, Tensor], memory: Mapping[str, Tensor]
    ) -> StepDecision:
        is_first = torch.arange(inputs.canvas.shape[-1], device=inputs.canvas.device) == 0
        tokens = torch.where(is_first, inputs.canvas, inputs.candidate)
        return StepDecision(
            keep=inputs.valid,
            tokens=tokens,
            result=tokens,
            done=torch.ones_like(inputs.step, dtype=torch.bool),
            memory={},
        )
