"""DiffusionGemma's rule: accept by an entropy budget, stop when stable and confident."""

from __future__ import annotations

import torch

from vllm_diffusion.decoding.policy import StepDecision, StepInputs


def entropy_bound_policy(inputs: StepInputs) -> StepDecision:
    """Accept positions from most to least certain while the entropy before each is in budget.

    Done when the argmax canvas repeated for ``stability_threshold`` steps and the mean entropy is
    below ``confidence_threshold``. What is committed is the argmax canvas, not the noisy one.

    Source: arXiv:2505.24857 (the bound) and ``EntropyBoundSampler`` and
    ``StableAndConfidentStoppingCriteria`` of transformers' diffusion_gemma.
    """
    # Positions beyond a narrow canvas sort last and take nothing from the budget.
    entropy = torch.where(inputs.valid, inputs.entropy, torch.inf)
    ascending, order = torch.sort(entropy, dim=-1, stable=True)
    accepted = ascending.cumsum(dim=-1) - ascending <= inputs.entropy_bound[:, None]
    keep = torch.zeros_like(accepted).scatter(-1, order, accepted) & inputs.valid

    counted = inputs.counted
    repeated = ((inputs.argmax == inputs.previous_argmax) | ~counted).all(dim=-1)
    stable_steps = torch.where(repeated, inputs.stable_steps + 1, 0)
    num_counted = counted.sum(dim=-1).clamp(min=1)
    mean_entropy = torch.where(counted, inputs.entropy, 0.0).sum(dim=-1) / num_counted
    done = (stable_steps >= inputs.stability_threshold) & (
        mean_entropy < inputs.confidence_threshold
    )
    return StepDecision(
        keep=keep,
        tokens=inputs.candidate,
        result=inputs.argmax,
        done=done,
        stable_steps=stable_steps,
    )
