"""The rules, against Hugging Face's own classes and by their definitions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_diffusion.decoding.confidence_threshold import confidence_threshold_policy
from vllm_diffusion.decoding.entropy_bound import entropy_bound_policy
from vllm_diffusion.decoding.policy import StepInputs


def inputs(**values: torch.Tensor) -> StepInputs:
    """Step inputs of R slots and C positions with everything not given at zero."""
    R, C = next(v.shape for v in values.values() if v.dim() == 2)
    zeros = torch.zeros(R, C, dtype=torch.int64)
    defaults = {
        "candidate": zeros,
        "argmax": zeros,
        "previous_argmax": zeros - 1,
        "entropy": torch.zeros(R, C),
        "confidence": torch.zeros(R, C),
        "canvas": zeros,
        "valid": torch.ones(R, C, dtype=torch.bool),
        "stable_steps": torch.zeros(R, dtype=torch.int32),
        "entropy_bound": torch.full((R,), 0.1),
        "confidence_threshold": torch.full((R,), 0.005),
        "stability_threshold": torch.ones(R, dtype=torch.int32),
    }
    chosen = defaults | values
    return StepInputs(**({"counted": chosen["valid"]} | chosen))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.01, 5.0), st.floats(0.1, 20.0))
def test_acceptance_is_that_of_transformers(seed, bound, gain):
    """The accepted positions are those of ``EntropyBoundSampler.accept_canvas``."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
        EntropyBoundSampler,
        EntropyBoundSamplerConfig,
    )

    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, 16, 30, generator=generator) * gain
    sampler = EntropyBoundSampler(EntropyBoundSamplerConfig(entropy_bound=bound), 16, 30, 8)
    current = torch.zeros(3, 16, dtype=torch.int64)
    sampler.accept_canvas(current, current, logits, 1)
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    decision = entropy_bound_policy(inputs(entropy=entropy, entropy_bound=torch.full((3,), bound)))
    assert torch.equal(decision.keep, sampler.accepted_token_mask)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.lists(st.integers(0, 2), min_size=1, max_size=12), st.booleans())
def test_stopping_is_that_of_transformers(threshold, canvases, confident):
    """Step by step the same verdict as ``StableAndConfidentStoppingCriteria``."""
    from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
        StableAndConfidentStoppingCriteria,
    )

    criteria = StableAndConfidentStoppingCriteria(threshold, 0.005)
    previous = torch.full((1, 4), -1)
    stable_steps = torch.zeros(1, dtype=torch.int32)
    logits = torch.zeros(1, 4, 8)
    if confident:
        logits[..., 0] = 100.0
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    for value in canvases:
        argmax = torch.full((1, 4), value)
        decision = entropy_bound_policy(
            inputs(
                argmax=argmax,
                previous_argmax=previous,
                entropy=entropy,
                stable_steps=stable_steps,
                stability_threshold=torch.tensor([threshold], dtype=torch.int32),
            )
        )
        assert bool(decision.done) == bool(criteria(argmax, logits))
        previous, stable_steps = argmax, decision.stable_steps


def test_positions_beyond_a_narrow_canvas_do_not_count():
    """They are not accepted, take nothing from the budget, and do not decide convergence."""
    entropy = torch.tensor([[0.05, 0.001, 9.0, 9.0]])
    valid = torch.tensor([[True, True, False, False]])
    argmax = torch.tensor([[1, 2, 3, 4]])
    decision = entropy_bound_policy(
        inputs(
            entropy=entropy,
            valid=valid,
            argmax=argmax,
            previous_argmax=torch.tensor([[1, 2, 7, 7]]),
            confidence_threshold=torch.tensor([0.1]),
        )
    )
    assert decision.keep.tolist() == [[True, True, False, False]]
    assert bool(decision.done)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.0, 1.0))
def test_confidence_threshold_always_ends(seed, threshold):
    """At least one position is revealed per step and none is masked again: C steps suffice."""
    mask, length = 99, 12
    policy = confidence_threshold_policy(mask)
    generator = torch.Generator().manual_seed(seed)
    canvas = torch.full((2, length), mask)
    for _ in range(length):
        candidate = torch.randint(0, 50, (2, length), generator=generator)
        decision = policy(
            inputs(
                candidate=candidate,
                canvas=canvas,
                confidence=torch.rand(2, length, generator=generator),
                confidence_threshold=torch.full((2,), threshold),
            )
        )
        after = torch.where(decision.keep, decision.tokens, mask)
        revealed = canvas != mask
        assert torch.equal(after[revealed], canvas[revealed])
        assert (
            ((after == mask).sum(-1) < (canvas == mask).sum(-1))
            .logical_or((canvas != mask).all(-1))
            .all()
        )
        assert torch.equal(decision.done, (after != mask).all(-1))
        canvas = after
        if bool(decision.done.all()):
            return
    raise AssertionError(f"not done after {length} steps")
