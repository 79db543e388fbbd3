"""Tests of LLaDA2.2's rule against its published loop on the same logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.families import llada2, run
from tests.support.families.model import scripted
from tests.support.models.specs import step_inputs
from vllm_diffusion.decoding.levenshtein import Levenshtein
from vllm_diffusion.decoding.reveal import DYNAMIC, STRATEGIES
from vllm_diffusion.decoding.rule import StepDecision, StepInputs

VOCAB, MASK, DELETE, SPLIT = 14, 4, 12, 13
RULE = Levenshtein(MASK, delete_token_id=DELETE, split_token_id=SPLIT)
PUBLISHED = {
    "reveal_threshold": 0.5,
    "strategy": STRATEGIES.index(DYNAMIC),
    "editing_threshold": 0.0,
    "max_post_steps": 16,
    "reveal_steps": 32,
    **RULE.defaults,
}

# The tokens of a block's prompt and of itself in, its logits [length, VOCAB] out.
Script = Callable[[Sequence[int]], Tensor]


def memory_of(num_slots: int, length: int, cap: int) -> dict[str, Tensor]:
    """Return the memory at the start of a canvas."""
    widths = {"canvas": (), "position": (length,), "step": (cap,)}
    return {
        name: torch.zeros(num_slots, *widths[memory.per], dtype=memory.dtype)
        for name, memory in RULE.memory.items()
    }


def decoded(
    scripts: Sequence[Script], given_tokens: Sequence[Sequence[int]], length: int, **chosen: float
) -> tuple[list[list[int]], list[int], list[bool]]:
    """Decode blocks together; return tokens, steps, and whether the last block's keys are final."""
    R, cap = len(scripts), int(chosen.pop("max_steps_per_block", 40))
    values = PUBLISHED | {"reveal_steps": length} | chosen
    canvas = torch.full((R, length), MASK)
    fixed = torch.zeros(R, length, dtype=torch.bool)
    for i, tokens in enumerate(given_tokens):
        canvas[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.long)
        fixed[i, : len(tokens)] = True
    memory = memory_of(R, length, cap)
    previous = torch.full_like(canvas, -1)
    results: list[list[int]] = [[] for _ in range(R)]
    num_steps, is_final = [0] * R, [False] * R
    for step in range(cap):
        logits = torch.stack([script(canvas[i].tolist()) for i, script in enumerate(scripts)])
        logits[..., MASK] = float("-inf")
        probabilities = logits.softmax(-1)
        choices = logits.sort(dim=-1, descending=True, stable=True).indices[..., :3]
        confidence = probabilities.amax(-1)
        decision = RULE.decide(
            step_inputs(
                canvas=canvas,
                candidate=choices[..., 0],
                drawn_confidence=confidence,
                argmax=choices[..., 0],
                previous_result=previous,
                fixed=fixed,
                step=torch.full((R,), step, dtype=torch.int32),
                max_steps=torch.full((R,), cap, dtype=torch.int32),
                confidence=confidence,
                choices=choices,
            ),
            {name: torch.full((R,), value) for name, value in values.items()},
            memory,
        )
        for name, tensor in decision.memory.items():
            assert tensor.dtype == memory[name].dtype
            assert tensor.shape == memory[name].shape
        assert decision.has_final_kv is not None
        for i in range(R):
            if not results[i] and decision.done[i]:
                results[i] = decision.result[i].tolist()
                num_steps[i], is_final[i] = step + 1, bool(decision.has_final_kv[i])
        previous, memory = decision.result, dict(decision.memory)
        canvas = torch.where(decision.keep, decision.tokens, MASK)
        if all(results):
            return results, num_steps, is_final
    raise AssertionError(f"not done after {cap} steps")


def published(
    script: Script, given_tokens: Sequence[int], length: int, **chosen: float
) -> tuple[list[int], int, bool]:
    """Return the same values of the published loop for one block alone."""
    arguments: dict[str, float] = {"max_steps_per_block": 40, "steps": length}
    names = {"reveal_threshold": "threshold", "reveal_steps": "steps"}
    arguments |= {names.get(name, name): value for name, value in chosen.items()}

    def whole(ids: Sequence[int]) -> Tensor:
        # What follows the block only decides whether the block is forwarded again.
        rows = script(ids[:length])
        return torch.cat([rows, rows])[: len(ids)]

    found = llada2.generate_2_2(
        run.suppress(scripted(whole), [MASK]),
        given_tokens,
        gen_length=2 * length - len(given_tokens),
        block_length=length,
        eos_ids=(),
        mask_id=MASK,
        delete_token_id=DELETE,
        split_token_id=SPLIT,
        **arguments,  # type: ignore[arg-type]
    )
    steps = sum(one.kind == "denoise" and one.start == 0 for one in found.passes)
    commits = any(one.kind == "commit" for one in found.passes)
    return [*given_tokens, *found.tokens[: length - len(given_tokens)]], steps, not commits


def moody(seed: int, gain: float, operations: float) -> Script:
    """Predict other tokens for every new block, with a preference for DELETE and SPLIT."""

    def script(tokens: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, *tokens)) % 2**40)
        logits = gain * torch.randn(len(tokens), VOCAB, generator=generator)
        logits[:, [DELETE, SPLIT]] += operations
        return logits

    return script


def stubborn(seed: int, operations: float) -> Script:
    """Alternate between two predictions of each position, which repeats earlier blocks."""
    generator = torch.Generator().manual_seed(seed)
    opinions = 3 * torch.randn(2, 16, VOCAB, generator=generator)
    opinions[..., [DELETE, SPLIT]] += operations

    def script(tokens: Sequence[int]) -> Tensor:
        return opinions[sum(tokens) % 2, : len(tokens)].clone()

    return script


@settings(max_examples=75, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 10_000),
            st.sampled_from(["moody", "stubborn"]),
            st.sampled_from([-9.0, 0.0, 1.5, 4.0]),
            st.integers(0, 5),
        ),
        min_size=1,
        max_size=3,
    ),
    st.sampled_from([0.1, 0.5, 0.95]),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from([0, 1, 3, 16]),
    st.sampled_from([1, 4, 6, 9]),
    st.sampled_from([1, 5, 40]),
)
def test_the_published_loop(blocks, threshold, editing, max_post_steps, reveal_steps, cap):
    """The rule gives the loop's tokens, steps and commits, whatever else is decoded with it."""
    length = 6
    scripts = [
        moody(seed, 2.0, operations) if mood == "moody" else stubborn(seed, operations)
        for seed, mood, operations, _ in blocks
    ]
    # A prompt may hold the ids themselves.
    prompts = [[5, DELETE, SPLIT, MASK, 7][:count] for *_, count in blocks]
    chosen = {
        "reveal_threshold": threshold,
        "editing_threshold": editing,
        "max_post_steps": max_post_steps,
        "reveal_steps": reveal_steps,
        "max_steps_per_block": cap,
    }
    tokens, steps, final = decoded(scripts, prompts, length, **chosen)
    for i, (script, prompt) in enumerate(zip(scripts, prompts, strict=True)):
        assert (tokens[i], steps[i], final[i]) == published(script, prompt, length, **chosen)
        assert not {MASK, DELETE, SPLIT} & set(tokens[i][len(prompt) :])


def certain(canvas: Tensor, said: Tensor, **changes: Any) -> StepInputs:
    """Return one step with certain tokens at all positions, or else token 5 or 6."""
    sure = torch.full(canvas.shape, 0.9)
    others = [torch.full_like(said, token) for token in (5, 6)]
    values: dict[str, Any] = {
        "candidate": said,
        "argmax": said,
        "drawn_confidence": sure,
        "confidence": sure,
        "choices": torch.stack([said, *others], dim=-1),
        "step": torch.full((len(canvas),), 3, dtype=torch.int32),
        "max_steps": torch.full((len(canvas),), 9, dtype=torch.int32),
    }
    return step_inputs(canvas=canvas, **(values | changes))


def decide(inputs: StepInputs, **remembered: Tensor) -> StepDecision:
    """Run a step at the published settings."""
    R, C = inputs.canvas.shape
    chosen = {name: torch.full((R,), value) for name, value in PUBLISHED.items()}
    return RULE.decide(inputs, chosen, memory_of(R, C, 9) | remembered)


def test_fixed_positions_do_not_move():
    """Fixed positions stay in place, and DELETE and SPLIT move only what is between them."""
    canvas = torch.tensor([[7, 8, 9, 10, 11]] * 2)
    fixed = torch.tensor([[False, False, True, False, False]] * 2)
    said = torch.tensor([[DELETE, 8, 3, 10, 11], [SPLIT, 8, 3, 10, 11]])
    decision = decide(certain(canvas, said, fixed=fixed))
    assert decision.tokens.tolist() == [[8, 10, 9, 11, MASK], [MASK, 7, 9, 8, 10]]
    assert decision.keep.tolist() == [[True] * 4 + [False], [False] + [True] * 4]


def test_what_follows_an_end_token_is_no_reason_to_go_on():
    """With judging up to the end token a block stops, and emits no mask or operation after it."""
    canvas = torch.tensor([[7, 9, MASK, MASK]])
    said = torch.tensor([[7, 9, SPLIT, DELETE]])
    inputs = certain(canvas, said, previous_result=canvas, end_tokens=torch.tensor([[9]]))
    decision = decide(inputs)
    assert bool(decision.done)
    assert not bool(decision.has_final_kv)
    assert decision.result.tolist() == [[7, 9, 5, 5]]
    assert not decide(inputs._replace(end_tokens=None)).done.any()


def test_a_canvas_that_a_constraint_masks_again_is_done_when_it_repeats():
    """A canvas whose frontier stays masked is done when it predicts the same token again."""
    said = torch.tensor([[7, 8, 9, 10]])
    inputs = certain(torch.tensor([[7, MASK, 9, 10]]), said)
    assert not decide(inputs).done.any()
    decision = decide(inputs._replace(previous_result=said))
    assert bool(decision.done)
    assert not bool(decision.has_final_kv)


def test_a_position_with_one_possible_token():
    """A step that repeats an earlier one keeps a position that has only one possible token."""
    canvas, said = torch.tensor([[7, 8]]), torch.tensor([[9, 8]])
    inputs = certain(canvas, said, choices=torch.stack([said] * 3, dim=-1))
    remembered = decide(inputs).memory["fingerprints"]
    inputs = inputs._replace(step=inputs.step + 1)
    decision = decide(inputs, fingerprints=remembered)
    assert torch.equal(decision.tokens, said)
