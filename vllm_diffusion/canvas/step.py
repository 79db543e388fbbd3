"""One step of every canvas, as one compiled function over all request slots.

All shapes are those of the slots, so the function is compiled once whatever the batch. R is the
number of slots, C the canvas length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.noise import Purpose, uniform_tokens
from vllm_diffusion.canvas.slots import CanvasSlots
from vllm_diffusion.decoding.policy import Policy, StepInputs

# What fills positions that hold no decided token: (seed [R], canvas_idx [R], step [R], C,
# purpose) -> [R, C], int64.
Noise = Callable[[Tensor, Tensor, Tensor, int, Purpose], Tensor]


def uniform_noise(vocab_size: int) -> Noise:
    """Random tokens, uniform over the vocabulary (DiffusionGemma)."""

    def noise(
        seed: Tensor, canvas_idx: Tensor, step: Tensor, length: int, purpose: Purpose
    ) -> Tensor:
        return uniform_tokens(seed, canvas_idx, step, length, vocab_size, purpose)

    return noise


def mask_noise(mask_token_id: int) -> Noise:
    """The mask token (masked diffusion models)."""

    def noise(
        seed: Tensor, canvas_idx: Tensor, step: Tensor, length: int, purpose: Purpose
    ) -> Tensor:
        return torch.full(
            (seed.shape[0], length), mask_token_id, dtype=torch.int64, device=seed.device
        )

    return noise


class SlotStatistics(NamedTuple):
    """What a pass found at each position of each slot, all [R, C].

    A slot without rows in the pass has what an earlier pass left there, and nothing reads it.
    """

    argmax: Tensor
    candidate: Tensor
    entropy: Tensor
    confidence: Tensor
    drawn_confidence: Tensor


class StepOutput(NamedTuple):
    """What the engine is told.

    Attributes:
        tokens: [R, C], int64, tokens of an emitting slot.
        num_emitted: [R], int32, how many of them are emitted now; 0 for most.
    """

    tokens: Tensor
    num_emitted: Tensor


def schedule_temperature(slots: CanvasSlots) -> Tensor:
    """[R], float32: each slot's temperature at its current step."""
    remaining = (slots.max_steps - slots.step).clamp(min=1).float()
    fraction = remaining / slots.max_steps.clamp(min=1).float()
    return slots.t_min + (slots.t_max - slots.t_min) * fraction


def make_canvas_step(
    slots: CanvasSlots,
    policy: Policy,
    noise: Noise,
    *,
    converge_at_end: bool = False,
    emits_when_done: bool = True,
    compile_backend: str | None,
) -> Callable[..., StepOutput]:
    """Bind :func:`advance_canvases` to a server's state, policy and noise.

    Args:
        slots: The state, updated in place.
        policy: The rule that decides what to keep.
        noise: What fills the rest.
        converge_at_end: Judge a canvas by its positions up to its first end token.
        emits_when_done: A canvas is emitted in the step that converges, and the scheduler has it
            encoded as it does known tokens. Otherwise the next pass over its rows encodes it, and
            emits it.
        compile_backend: Backend of ``torch.compile``; ``None`` runs eagerly.
    """

    def step(statistics: SlotStatistics, *tensors: Tensor) -> StepOutput:
        return advance_canvases(
            slots, policy, noise, converge_at_end, emits_when_done, statistics, *tensors
        )

    if compile_backend is None:
        return step
    return torch.compile(step, fullgraph=True, dynamic=False, backend=compile_backend)


def advance_canvases(
    slots: CanvasSlots,
    policy: Policy,
    noise: Noise,
    converge_at_end: bool,
    emits_when_done: bool,
    statistics: SlotStatistics,
    num_rows: Tensor,
    starting: Tensor,
    seed: Tensor,
    num_valid: Tensor,
    free_from: Tensor,
    free_to: Tensor,
) -> StepOutput:
    """Denoise, converge, emit and begin canvases: whatever each slot is at.

    Args:
        slots: The state, updated in place.
        policy: The rule that decides what to keep.
        noise: What fills the rest.
        converge_at_end: Judge a canvas by its positions up to its first end token.
        emits_when_done: See :func:`make_canvas_step`.
        statistics: Of the rows that ran.
        num_rows: [R], int32, canvas rows of each slot in this pass; 0 for a slot that had none.
        starting: [R], bool, slots whose prompt was completed in this pass.
        seed: [R], int64, each request's seed.
        num_valid: [R], int32, leading positions that a constrained canvas must repeat in its last
            step; 0 where no step may be the last yet, -1 without a constraint.
        free_from: [R], int32, first position that becomes noise whatever the policy says.
        free_to: [R], int32, the position after the last such one.
    """
    C = slots.canvas_length
    active = num_rows > 0
    encoded = active & slots.encoding
    denoised = active & ~slots.encoding
    position = torch.arange(C, device=num_rows.device)[None, :]
    valid = position < num_rows[:, None]
    counted = valid
    if converge_at_end:
        is_end = (statistics.argmax[..., None] == slots.end_tokens[:, None]).any(dim=-1)
        counted = valid & (is_end.cumsum(dim=-1) - is_end.long() == 0)

    decision = policy(
        StepInputs(
            candidate=statistics.candidate,
            argmax=statistics.argmax,
            previous_argmax=slots.argmax_canvas,
            entropy=statistics.entropy,
            confidence=statistics.confidence,
            canvas=slots.canvas,
            valid=valid,
            counted=counted,
            stable_steps=slots.stable_steps,
            entropy_bound=slots.entropy_bound,
            confidence_threshold=slots.confidence_threshold,
            stability_threshold=slots.stability_threshold,
        )
    )
    repeats = ((decision.result == slots.argmax_canvas) | (position >= num_valid[:, None])).all(
        dim=-1
    )
    may_end = (num_valid < 0) | ((num_valid > 0) & repeats)
    done = denoised & may_end & (decision.done | (slots.step + 1 >= slots.max_steps))
    finished = done if emits_when_done else encoded
    emitting = finished | (done & slots.read_only)

    # Tokens of the canvas as it will be committed: on an encode pass, what was decided before.
    result = torch.where(denoised[:, None], decision.result, slots.canvas)

    # The next pass's canvas.
    freed = (position >= free_from[:, None]) & (position < free_to[:, None])
    renoised = torch.where(
        decision.keep & ~freed,
        decision.tokens,
        noise(seed, slots.canvas_idx, slots.step, C, Purpose.RENOISE),
    )
    renoised = torch.where(slots.pinned, slots.seed_canvas, renoised)
    denoised_canvas = torch.where(done[:, None], result, renoised)
    fresh = finished | starting
    canvas_idx = slots.canvas_idx + finished.to(torch.int32)
    first_step = torch.zeros_like(slots.step)
    initial = noise(seed, canvas_idx, first_step, C, Purpose.INITIAL)
    initial = torch.where((starting & slots.has_seed_canvas)[:, None], slots.seed_canvas, initial)
    canvas = torch.where(denoised[:, None], denoised_canvas, slots.canvas)
    canvas = torch.where(fresh[:, None], initial, canvas)

    step = torch.where(denoised, slots.step + 1, slots.step)
    stable_steps = torch.where(denoised, decision.stable_steps, slots.stable_steps)
    argmax_canvas = torch.where(denoised[:, None], decision.result, slots.argmax_canvas)
    encoding = torch.where(denoised, done & ~slots.read_only, slots.encoding)

    slots.canvas.copy_(canvas)
    slots.argmax_canvas.copy_(torch.where(fresh[:, None], -1, argmax_canvas))
    slots.step.copy_(torch.where(fresh, first_step, step))
    slots.stable_steps.copy_(torch.where(fresh, torch.zeros_like(stable_steps), stable_steps))
    slots.canvas_idx.copy_(canvas_idx)
    slots.encoding.copy_(encoding & ~fresh)
    return StepOutput(
        tokens=result, num_emitted=torch.where(emitting, num_rows, torch.zeros_like(num_rows))
    )
