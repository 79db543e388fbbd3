"""The rule of masked models: reveal what is confident, keep it, stop when nothing is masked."""

from __future__ import annotations

import torch

from vllm_diffusion.decoding.policy import Policy, StepDecision, StepInputs


def confidence_threshold_policy(mask_token_id: int) -> Policy:
    """Reveal masked positions whose likeliest token has at least ``confidence_threshold``.

    At least one position, the most confident one, is revealed in every step, so a canvas of C
    positions needs at most C steps. A revealed token is never masked again.

    Args:
        mask_token_id: The token that stands for "not yet revealed".

    Source: Fast-dLLM, arXiv:2505.22618, section 3.3 (parallel decoding by confidence).
    """

    def policy(inputs: StepInputs) -> StepDecision:
        masked = (inputs.canvas == mask_token_id) & inputs.valid
        confidence = torch.where(masked, inputs.confidence, -1.0)
        best = torch.zeros_like(masked).scatter(-1, confidence.argmax(dim=-1, keepdim=True), True)
        reveal = masked & ((confidence >= inputs.confidence_threshold[:, None]) | best)
        tokens = torch.where(masked, inputs.candidate, inputs.canvas)
        return StepDecision(
            keep=reveal | ~masked,
            tokens=tokens,
            # At the step cap whatever is still masked is taken as it is drawn.
            result=tokens,
            done=~(masked & ~reveal & inputs.counted).any(dim=-1),
            stable_steps=inputs.stable_steps,
        )

    return policy
