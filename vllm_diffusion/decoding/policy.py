"""The rule that decides, after each denoising step, what of a canvas to keep and when to stop.

A policy is a pure function of tensors, one row per request slot. It runs inside a compiled
function, so it has no branch on a tensor's value; rows of idle slots hold anything and what it
says of them is ignored.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class StepInputs(NamedTuple):
    """What is known after a step's forward pass.

    R is the number of request slots, C the canvas length.

    Attributes:
        candidate: [R, C], int64, the token drawn at each position.
        argmax: [R, C], int64, the likeliest token.
        previous_argmax: [R, C], int64, that of the step before; -1 on a canvas's first step.
        entropy: [R, C], float32, nats.
        confidence: [R, C], float32, probability of ``argmax``.
        canvas: [R, C], int64, the tokens that the step started from.
        valid: [R, C], bool, positions that the request's canvas has.
        counted: [R, C], bool, those by which convergence is judged.
        stable_steps: [R], int32, how many steps in a row, before this one, repeated the argmax
            of the step before them.
        entropy_bound: [R], float32, nats.
        confidence_threshold: [R], float32.
        stability_threshold: [R], int32, steps.
    """

    candidate: Tensor
    argmax: Tensor
    previous_argmax: Tensor
    entropy: Tensor
    confidence: Tensor
    canvas: Tensor
    valid: Tensor
    counted: Tensor
    stable_steps: Tensor
    entropy_bound: Tensor
    confidence_threshold: Tensor
    stability_threshold: Tensor


class StepDecision(NamedTuple):
    """What becomes of each canvas.

    Attributes:
        keep: [R, C], bool, positions whose token enters the next step; the rest is noise again.
        tokens: [R, C], int64, the token at kept positions.
        result: [R, C], int64, what is committed if this was the canvas's last step.
        done: [R], bool, the canvas has converged.
        stable_steps: [R], int32, updated.
    """

    keep: Tensor
    tokens: Tensor
    result: Tensor
    done: Tensor
    stable_steps: Tensor


class Policy(Protocol):
    """Any function of this signature."""

    def __call__(self, inputs: StepInputs) -> StepDecision: ...
