"""The rule that decides, after each denoising step, what of a canvas to keep and when to stop.

A rule owns its settings, from which start-up, requests, presets and documentation derive; what it
remembers of a canvas from step to step; and its step. The step is a pure function of tensors, one
row per request slot. It runs inside a compiled function, so it has no branch on a tensor's value;
rows of idle slots hold anything and what it says of them is ignored.

R is the number of request slots, C the canvas length, N the server's step cap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from vllm_diffusion.decoding.settings import Choice, Setting


class StepInputs(NamedTuple):
    """What is known after a step's forward pass.

    Attributes:
        canvas: [R, C], int64, the tokens that the step started from.
        candidate: [R, C], int64, the token drawn at each position.
        drawn_confidence: [R, C], float32, its probability in what it was drawn from.
        argmax: [R, C], int64, the likeliest token.
        entropy: [R, C], float32, nats.
        previous_result: [R, C], int64, what the step before would have committed; -1 on a canvas's
            first step.
        valid: [R, C], bool, positions that the request's canvas has.
        fixed: [R, C], bool, those whose token is given, by the prompt or the request.
        end_tokens: [R, E], int64, tokens that end the request, -1 where there are fewer; ``None``
            if a canvas is judged by all of its positions.
        step: [R], int32, steps of this canvas before this one.
        max_steps: [R], int32, the step cap.
        confidence: [R, C], float32, the probability of ``argmax``; ``None`` unless the rule looks at
            more choices than that.
        choices: [R, C, K], int64, the K likeliest tokens, the likeliest first, K being the rule's
            ``num_choices``; a position with fewer possible ones repeats its last. ``None`` where that
            is 0.
    """

    canvas: Tensor
    candidate: Tensor
    drawn_confidence: Tensor
    argmax: Tensor
    entropy: Tensor
    previous_result: Tensor
    valid: Tensor
    fixed: Tensor
    end_tokens: Tensor | None
    step: Tensor
    max_steps: Tensor
    confidence: Tensor | None = None
    choices: Tensor | None = None

    def counted(self, tokens: Tensor, decided: Tensor | None = None) -> Tensor:
        """[R, C], bool: the positions by which a canvas is judged.

        All valid ones, or those up to the first end token: what follows it is thrown away.

        Args:
            tokens: [R, C], int64.
            decided: [R, C], bool, where an end token counts as one; ``None`` everywhere.
        """
        if self.end_tokens is None:
            return self.valid
        is_end = (tokens[..., None] == self.end_tokens[:, None]).any(dim=-1) & ~self.fixed
        if decided is not None:
            is_end = is_end & decided
        return self.valid & (is_end.cumsum(dim=-1) - is_end.long() == 0)


class StepDecision(NamedTuple):
    """What becomes of each canvas.

    Attributes:
        keep: [R, C], bool, positions whose token enters the next step; the rest is noise again.
        tokens: [R, C], int64, the token at kept positions.
        result: [R, C], int64, what is committed if this was the canvas's last step.
        done: [R], bool, the canvas has converged.
        memory: What the rule remembers, by name, in the shapes of :class:`Memory`.
        has_final_kv: [R], bool: keys and values that this pass wrote are those of ``result``;
            ``None`` if they never are.
    """

    keep: Tensor
    tokens: Tensor
    result: Tensor
    done: Tensor
    memory: Mapping[str, Tensor]
    has_final_kv: Tensor | None = None


class Memory(NamedTuple):
    """A tensor in which a rule remembers something of each canvas; 0 when a canvas begins.

    Attributes:
        dtype: Of its elements.
        per: What has an element: a canvas, [R]; each position of one, [R, C]; each step of one up to
            the server's cap, [R, N].
    """

    dtype: torch.dtype
    per: Literal["canvas", "position", "step"] = "canvas"


def as_drawn(requested: Tensor) -> tuple[Tensor, Tensor]:
    """Temperatures of a rule that judges tokens in the distribution they are drawn from.

    Args:
        requested: [R], float32; 0 takes the likeliest token at its plain probability.

    Returns:
        As :meth:`DecodingRule.temperatures`.
    """
    one = torch.ones_like(requested)
    is_greedy = requested == 0
    return torch.where(is_greedy, one, requested), torch.where(is_greedy, requested, one)


class DecodingRule(ABC):
    """One way to denoise; an instance holds what a family fixes of it.

    Attributes:
        settings: What a server and a request may set, by name.
        presets: Values that go together, by name.
        memory: What is remembered of a canvas from step to step, by name.
        refused_fields: Request fields that the rule cannot honour, each with the reason and the
            remedy.
        refused_settings: The same for what an operator sets.
        num_choices: How many of the likeliest tokens of each position a step looks at, where the
            likeliest and the drawn one are not enough; 0 if they are.
        can_finish_kv: Whether the last step's keys and values may be those of the result, so that no
            pass need encode it.
        judges_to_end: Whether a canvas is judged by its positions up to its first end token, whatever
            the server's ``converge_at_end`` says.
    """

    settings: ClassVar[Mapping[str, Setting | Choice]]
    presets: ClassVar[Mapping[str, Mapping[str, float | str]]] = {}
    memory: ClassVar[Mapping[str, Memory]] = {}
    refused_fields: ClassVar[Mapping[str, str]] = {}
    refused_settings: ClassVar[Mapping[str, str]] = {}
    num_choices: ClassVar[int] = 0
    can_finish_kv: ClassVar[bool] = False
    judges_to_end: bool = False

    def contradiction(
        self, values: Mapping[str, float | str]
    ) -> tuple[tuple[str, ...], str] | None:
        """Settings whose values are each allowed but do not go together, and the reason."""
        return None

    @abstractmethod
    def temperatures(
        self,
        settings: Mapping[str, Tensor],
        step: Tensor,
        max_steps: Tensor,
        requested: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Two float32 tensors [R]: what logits are divided by where a step judges them, and by what
        more where it draws from them; 0 there takes the likeliest token.

        Args:
            settings: [R] each.
            step: [R], int32.
            max_steps: [R], int32.
            requested: [R], float32, the ``temperature`` of the requests.
        """

    @abstractmethod
    def decide(
        self, inputs: StepInputs, settings: Mapping[str, Tensor], memory: Mapping[str, Tensor]
    ) -> StepDecision:
        """What becomes of the canvases.

        Args:
            inputs: What the pass found.
            settings: [R] each.
            memory: As the step before left it.
        """
