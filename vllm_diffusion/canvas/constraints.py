"""Constraints of canvases that are held to a grammar or a list of words, from scheduler to sampler."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput


@dataclass(frozen=True)
class CanvasConstraint:
    """The constraint of one request's canvas in one pass.

    Positions are counted from the first that is no known token.

    Attributes:
        pinned: Tokens of the leading positions.
        frontier_mask: [ceil(vocab_size / 32)], int32: a bit for every token allowed at the position
            after them; ``None`` if all are.
        restart: Denoise what follows the frontier anew.
        num_valid: Leading positions of the previous step's argmax canvas that satisfy the constraint
            and are all that will be read; 0 if it does not satisfy it, and may not be committed.
        num_given: Positions of the canvas before them, which are known tokens.
    """

    pinned: tuple[int, ...]
    frontier_mask: np.ndarray | None
    restart: bool
    num_valid: int
    num_given: int = 0


@dataclass
class CanvasConstraints(GrammarOutput):
    """vLLM's message from the scheduler to the sampler, with a constraint for each request."""

    constraints: list[CanvasConstraint] = field(default_factory=list)
