"""Tests of the rules against Hugging Face's own classes and against their definitions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.families import bd3lm
from tests.support.models.specs import step_inputs, without_unread
from vllm_diffusion.decoding.entropy_bound import EntropyBound
from vllm_diffusion.decoding.reveal import (
    DYNAMIC,
    ENTROPY,
    ENTROPY_BUDGET,
    SEQUENTIAL,
    STRATEGIES,
    Reveal,
)
from vllm_diffusion.decoding.reveal_in_blocks import RevealInBlocks
from vllm_diffusion.decoding.rule import StepDecision, StepInputs

MASK = 99


def entropy_bound(
    given_inputs: StepInputs, stable_steps: torch.Tensor | None = None, **changes: float
) -> StepDecision:
    """Run DiffusionGemma's rule, at its published settings by default."""
    R = len(given_inputs.canvas)
    chosen = {"entropy_bound": 0.1, "confidence_threshold": 0.005, "stability_threshold": 1}
    if stable_steps is None:
        stable_steps = torch.zeros(R, dtype=torch.int32)
    return EntropyBound().decide(
        given_inputs,
        {name: torch.full((R,), value) for name, value in (chosen | changes).items()},
        {"stable_steps": stable_steps},
    )


def reveal(given_inputs: StepInputs) -> StepDecision:
    """Run a step of the masked rule, with the same settings for all requests."""
    R = len(given_inputs.canvas)
    chosen = {
        "reveal_threshold": torch.full((R,), 0.5),
        "strategy": torch.full((R,), STRATEGIES.index(DYNAMIC)),
        "entropy_budget": torch.full((R,), Reveal.defaults["entropy_budget"]),
    }
    return Reveal(MASK).decide(given_inputs, chosen, {})


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
    decision = entropy_bound(step_inputs(entropy=entropy), entropy_bound=bound)
    assert torch.equal(decision.keep, sampler.accepted_token_mask)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.lists(st.integers(0, 2), min_size=1, max_size=12), st.booleans())
def test_stopping_is_that_of_transformers(threshold, canvases, confident):
    """Each step stops exactly where ``StableAndConfidentStoppingCriteria`` does."""
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
        decision = entropy_bound(
            step_inputs(argmax=argmax, previous_result=previous, entropy=entropy),
            stable_steps,
            stability_threshold=threshold,
        )
        assert bool(decision.done) == bool(criteria(argmax, logits))
        previous, stable_steps = argmax, decision.memory["stable_steps"]


def test_positions_beyond_a_narrow_canvas_do_not_count():
    """Positions beyond a narrow canvas are not accepted and do not affect convergence."""
    entropy = torch.tensor([[0.05, 0.001, 9.0, 9.0]])
    valid = torch.tensor([[True, True, False, False]])
    argmax = torch.tensor([[1, 2, 3, 4]])
    decision = entropy_bound(
        step_inputs(
            entropy=entropy,
            valid=valid,
            argmax=argmax,
            previous_result=torch.tensor([[1, 2, 7, 7]]),
        ),
        confidence_threshold=0.1,
    )
    assert decision.keep.tolist() == [[True, True, False, False]]
    assert bool(decision.done)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_masks", [32, 16, 5])
def test_the_schedule_of_bd3lm(num_masks: int, compiled: bool) -> None:
    """Each step reveals as many masks as the published float32 arithmetic prescribes."""
    rule = Reveal(MASK, spreads_masks=True, rounds_to_even=True)
    num_least = torch.compile(rule.num_least) if compiled else rule.num_least
    max_steps = torch.arange(1, 2 * 32 + 1, dtype=torch.int32)
    left = torch.full_like(max_steps, num_masks)
    found: list[list[int]] = [[] for _ in max_steps]
    for step in range(num_masks):
        masked = torch.arange(num_masks) < left[:, None]
        inputs = step_inputs(
            canvas=torch.where(masked, MASK, 0),
            step=torch.full_like(max_steps, step),
            max_steps=max_steps,
        )
        numbers = torch.where(left > 0, num_least(inputs, masked).minimum(left), 0)
        for schedule, number in zip(found, numbers.tolist(), strict=True):
            schedule.extend([number] * (number > 0))
        left = left - numbers
    assert found == [bd3lm.schedule(num_masks, int(steps)) for steps in max_steps]


def _by_definition(
    strategy: str,
    candidates: list[int],
    confidence: list[float],
    entropy: list[float],
    num_least: int,
    threshold: float,
    budget: float,
) -> set[int]:
    """Return the positions that a step reveals of those that it may."""
    # Sorting is stable, so the leftmost of equals comes first.
    by_confidence = sorted(candidates, key=lambda i: -confidence[i])
    by_entropy = sorted(candidates, key=lambda i: entropy[i])
    if strategy == SEQUENTIAL:
        return set(candidates[:num_least])
    if strategy == ENTROPY:
        return set(by_entropy[:num_least])
    if strategy == ENTROPY_BUDGET:
        longest = 0
        for length in range(1, len(by_entropy) + 1):
            prefix = [entropy[i] for i in by_entropy[:length]]
            if sum(prefix) - max(prefix) <= budget:
                longest = length
        return set(by_entropy[: max(longest, num_least)])
    above = {i for i in candidates if confidence[i] > threshold}
    if strategy == DYNAMIC and len(above) >= num_least:
        return above
    return set(by_confidence[:num_least])


# Sums of these are exact in float32, in any order.
_SIXTEENTHS = st.integers(0, 48).map(lambda n: n / 16)


@settings(max_examples=75, deadline=None)
@given(st.data(), st.sampled_from([None, 3]), st.booleans())
def test_orders_of_one_batch(data, sub_block_length, spreads_masks):
    """Each request reveals by its own strategy and budget, whatever else is in the batch: at least
    one mask, so C steps suffice. What was decided stays, and no mask is emitted.
    """
    R, C = len(STRATEGIES) + 2, 7

    def table(element):
        row = st.lists(element, min_size=C, max_size=C)
        return data.draw(st.lists(row, min_size=R, max_size=R))

    def column(element):
        return data.draw(st.lists(element, min_size=R, max_size=R))

    decided, fixed, entropy = table(st.booleans()), table(st.booleans()), table(_SIXTEENTHS)
    confidence = table(st.integers(0, 16).map(lambda n: n / 16))
    strategies = column(st.sampled_from(STRATEGIES))
    thresholds, budgets = column(st.sampled_from([0.25, 0.5, 1.0])), column(_SIXTEENTHS)
    num_valid, steps, caps = (column(st.integers(low, C)) for low in (1, 0, 1))
    canvas, is_fixed = torch.where(torch.tensor(decided), 5, MASK), torch.tensor(fixed)
    valid = torch.arange(C) < torch.tensor(num_valid)[:, None]
    decision = Reveal(MASK, sub_block_length=sub_block_length, spreads_masks=spreads_masks).decide(
        step_inputs(
            canvas=canvas,
            candidate=torch.full((R, C), 7),
            drawn_confidence=torch.tensor(confidence),
            entropy=torch.tensor(entropy),
            valid=valid,
            fixed=is_fixed,
            step=torch.tensor(steps),
            max_steps=torch.tensor(caps),
        ),
        {
            "reveal_threshold": torch.tensor(thresholds),
            "strategy": torch.tensor([STRATEGIES.index(s) for s in strategies]),
            "entropy_budget": torch.tensor(budgets),
        },
        {},
    )
    after = torch.where(decision.keep, decision.tokens, MASK)
    # A prompt may hold the mask token, which is not a mask there.
    stays = ((canvas != MASK) | is_fixed) & valid
    assert torch.equal(after[stays], canvas[stays])
    assert torch.equal(decision.done, ~((after == MASK) & ~is_fixed & valid).any(-1))
    assert MASK not in decision.result[~is_fixed & valid]
    for r in range(R):
        masks = [i for i in range(num_valid[r]) if not decided[r][i] and not fixed[r][i]]
        if spreads_masks:
            num_least = -(-len(masks) // max(caps[r] - steps[r], 1))
        else:
            num_least = C // caps[r] + (steps[r] < C % caps[r])
        candidates = masks
        if sub_block_length is not None:
            first = min((i // sub_block_length for i in masks), default=0)
            candidates = [i for i in masks if i // sub_block_length == first]
        revealed = _by_definition(
            strategies[r],
            candidates,
            confidence[r],
            entropy[r],
            max(num_least, 1),
            thresholds[r],
            budgets[r],
        )
        kept = {i for i in masks if decision.keep[r, i]}
        assert kept == revealed, (r, strategies[r])


def test_an_end_with_no_mask_before_it_ends_the_canvas():
    """If family or server ask for it, a drawn end token ends the canvas; the prompt's do not."""
    canvas = torch.tensor([[3, MASK, MASK, MASK], [3, MASK, MASK, MASK], [9, MASK, MASK, MASK]])
    given_inputs = step_inputs(
        canvas=canvas,
        candidate=torch.tensor([[0, 9, 1, 1], [0, 1, 9, 1], [0, 1, 2, 1]]),
        drawn_confidence=torch.tensor([[0, 0.9, 0.1, 0.1], [0, 0.1, 0.9, 0.1], [0, 0.9, 0.1, 0.1]]),
        fixed=torch.tensor([[True, False, False, False]] * 3),
        known=torch.tensor([[True, False, False, False]] * 3),
        end_tokens=torch.tensor([[9]] * 3),
    )
    assert reveal(given_inputs).done.tolist() == [True, False, False]
    unaware = given_inputs._replace(end_tokens=None)
    assert not reveal(unaware).done.any()


@given(
    num_known=st.integers(0, 9),
    num_emitted=st.integers(0, 2),
    block_length=st.integers(1, 6),
    strategy=st.sampled_from(RevealInBlocks.settings["strategy"].words),
    data=st.data(),
)
def test_only_the_first_block_is_revealed(
    num_known: int, num_emitted: int, block_length: int, strategy: str, data: st.DataObject
) -> None:
    """Positions after the first block stay masked, are not emitted, and are not read."""
    length = num_known + 3 * block_length
    num_given = num_known + num_emitted * block_length
    end = num_given + block_length
    position = torch.arange(length)[None]
    canvas = torch.where(position < num_given, 7, MASK)
    revealed = data.draw(st.lists(st.booleans(), min_size=block_length, max_size=block_length))
    canvas[0, num_given:end] = torch.where(torch.tensor(revealed), 8, MASK)
    rule = RevealInBlocks(MASK, spreads_masks=True)
    settings = {
        name: torch.tensor([rule.settings[name].number(value)])
        for name, value in {
            "strategy": strategy,
            "reveal_threshold": 0.5,
            "entropy_budget": 0.1,
            "block_length": block_length,
        }.items()
    }
    inputs = step_inputs(
        canvas=canvas,
        candidate=torch.full_like(canvas, 9),
        drawn_confidence=torch.rand(1, length),
        entropy=torch.rand(1, length),
        fixed=position < num_given,
        known=position < num_given,
        uniform=torch.rand(1, length),
    )
    decision = rule.decide(inputs, settings, {})
    of_the_rest = rule.decide(without_unread(rule, inputs, settings), settings, {})
    for field in ("keep", "tokens", "result", "done", "num_final"):
        assert torch.equal(getattr(decision, field), getattr(of_the_rest, field))
    after = torch.where(decision.keep, decision.tokens, MASK)
    assert decision.num_final is not None
    assert int(decision.num_final) == end
    assert (after[0, end:] == MASK).all()
    assert torch.equal(after[0, :num_given], canvas[0, :num_given])
    block = after[0, num_given:end]
    assert bool(decision.done) == bool((block != MASK).all())
    # At least one more, and what was revealed stays.
    assert all(bool(block[i] == 8) for i in range(block_length) if revealed[i])
    assert all(revealed) or int((block == 9).sum()) > 0
