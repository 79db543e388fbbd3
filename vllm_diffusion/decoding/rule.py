"""Decoding rules: after each denoising step they decide which tokens to keep and when to stop.

A rule owns its settings, from which start-up, requests, presets and documentation derive; its
memory of a canvas from step to step; and its step. The step is a pure function of tensors, one row
per request slot. It runs inside a compiled function, so it has no branch on a tensor's value; rows
of idle slots hold arbitrary values, and its result for them is ignored.

A server sets settings under their names, a request with the prefix ``diffusion_``. Numbers are
bounded by the dtype of the tensor that holds them on the device, int32 or float32.

R is the number of request slots, C the canvas length, N the server's step cap.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

# Settings of a rule by name, of one request or of a server; and as tensors of all slots, as is a
# rule's memory of canvases.
Values = Mapping[str, float | str]
Tensors = Mapping[str, Tensor]

INT32_MAX = 2**31 - 1
# Smaller numbers lose their digits in float32, or are 0.
FLOAT32_MIN, FLOAT32_MAX = 2.0**-126, 3.4028234663852886e38


@dataclass(frozen=True)
class Setting:
    """Setting whose value is a number.

    Attributes:
        kind: ``int`` or ``float``.
        low: Smallest allowed value.
        high: Largest allowed value.
        meaning: Effect of the setting, in a few words of Markdown.
    """

    kind: type[int] | type[float]
    low: float
    high: float
    meaning: str = ""

    def allows(self, value: object) -> bool:
        """Return true if ``value`` is an allowed number."""
        kinds = (int,) if self.kind is int else (int, float)
        # JSON's true and false are integers in Python; NaN fails the comparison.
        if not isinstance(value, kinds) or isinstance(value, bool):
            return False
        number: float = value
        return self.low <= number <= self.high

    @property
    def requirement(self) -> str:
        """End of the message about a number that is not allowed, after its name."""
        noun = "an integer" if self.kind is int else "a number"
        return f"must be {noun} of at least {self.low:.10g} and at most {self.high:.10g}"

    @property
    def values(self) -> str:
        """Allowed values in a few words, for the documentation."""
        if self.kind is int:
            return f"integer, {self.low:,} to {self.high:,}"
        return f"number, {self.low:.7g} to {self.high:.7g}"

    @property
    def bounds(self) -> dict[str, Any]:
        """Allowed values as JSON: ``is_integer``, ``low`` and ``high``."""
        return {"is_integer": self.kind is int, "low": self.low, "high": self.high}

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensor that holds it."""
        return torch.int32 if self.kind is int else torch.float32

    def number(self, value: float | str) -> float:
        """Convert a value to the number in the tensor."""
        return self.kind(value)


@dataclass(frozen=True)
class Choice:
    """Setting whose value is one of a few words.

    Attributes:
        words: Allowed words; the tensor holds the index of one.
        meaning: Effect of the setting, in a few words of Markdown.
    """

    words: tuple[str, ...]
    meaning: str = ""
    dtype = torch.int32

    def allows(self, value: object) -> bool:
        """Return true if ``value`` is one of the words."""
        return isinstance(value, str) and value in self.words

    @property
    def values(self) -> str:
        """Allowed values in a few words, for the documentation."""
        return ", ".join(f'`"{word}"`' for word in self.words)

    @property
    def bounds(self) -> dict[str, Any]:
        """Allowed values as JSON: ``words``."""
        return {"words": self.words}

    @property
    def requirement(self) -> str:
        """End of the message about a word that is not allowed, after its name."""
        return f"must be one of {', '.join(self.words)}"

    def number(self, value: float | str) -> float:
        """Convert a word to its index in the tensor."""
        return self.words.index(str(value))


# Setting of a request that names its way, where a server has several: a rule of diffusion, or one
# of these two.
RULE, LINEAR_SPEC, AUTOREGRESSIVE = "rule", "linear_spec", "autoregressive"

# Each step is a pass: a larger cap would only be a mistake.
MAX_STEPS = Setting(int, 1, 10_000)
# A request's step cap is lowered to the server's.
REQUESTED_STEPS = Setting(int, 1, INT32_MAX)


class PositionStatistics(NamedTuple):
    """Statistics of positions: of n rows, [n], or of each position of each slot, [R, C].

    A slot without rows in the pass has what an earlier pass left there, and nothing reads it.

    Attributes:
        argmax: int64, the likeliest token.
        candidate: int64, the token drawn at each position.
        entropy: float32, nats, at the temperature of judging: of all tokens, or where the rule
            ``judges_filtered`` of what the request's filters keep.
        drawn_confidence: float32, probability of ``candidate`` in the distribution that it was
            drawn from.
        confidence: float32, the probability of ``argmax``; ``None`` unless the rule looks at more
            choices than that.
        choices: [..., K], int64, the K likeliest tokens, the likeliest first, K being the rule's
            ``num_choices``; a position with fewer possible ones repeats its last. ``None`` where
            that is 0.
        margin: float32, the probability of the likeliest token less that of the next one, of what
            the request's filters keep; ``None`` unless the rule ``judges_filtered``. Only those of
            requests for which it ``reads_margin`` are computed.
        named: [..., M], float32, probabilities of the rule's ``named_tokens``; ``None`` if there
            are none.
        soft_embeds: [n, hidden_size], float32, of rows alone: token embeddings weighted by their
            probability, for a model with self-conditioning.
    """

    argmax: Tensor
    candidate: Tensor
    entropy: Tensor
    drawn_confidence: Tensor
    confidence: Tensor | None = None
    choices: Tensor | None = None
    margin: Tensor | None = None
    named: Tensor | None = None
    soft_embeds: Tensor | None = None

    @property
    def num_likeliest(self) -> int:
        """K, likeliest tokens of each position in ``choices``; 0 without them."""
        return 0 if self.choices is None else self.choices.shape[-1]

    def write(self, slot: Tensor, position: Tensor, values: PositionStatistics) -> None:
        """Put statistics of rows at their places, as far as these are kept of slots.

        Args:
            slot: [n], int64, of each row.
            position: [n], int64, of each row in its canvas.
            values: Of the rows.
        """
        for held, own in zip(self, values, strict=True):
            if held is not None and own is not None:
                held[slot, position] = own


class StepInputs(NamedTuple):
    """Inputs of a rule after a step's forward pass.

    Attributes:
        canvas: [R, C], int64, the tokens that the step started from.
        predicted: Statistics of each position, [R, C], whose ``argmax`` at ``fixed`` positions is
            their token.
        previous_result: [R, C], int64, the result of the previous step; -1 on a canvas's first
            step.
        valid: [R, C], bool, positions that the request's canvas has.
        fixed: [R, C], bool, positions whose token is given, by the prompt or the request:
            ``canvas`` has it, and a result has it too.
        known: [R, C], bool, those of them that are tokens of the prompt.
        end_tokens: [R, E], int64, tokens that end the request, -1 where there are fewer; ``None``
            if a canvas is judged by all of its positions.
        step: [R], int32, steps of this canvas before this one.
        max_steps: [R], int32, the step cap.
        uniform: [R, C], float32, a random number between 0 and 1 for each position; ``None`` unless
            the rule draws positions.
        greedy: [R], bool, requests whose temperature is 0.
    """

    canvas: Tensor
    predicted: PositionStatistics
    previous_result: Tensor
    valid: Tensor
    fixed: Tensor
    known: Tensor
    end_tokens: Tensor | None
    step: Tensor
    max_steps: Tensor
    uniform: Tensor | None = None
    greedy: Tensor | None = None

    def with_predicted(self, **changed: Tensor) -> StepInputs:
        """Return the inputs with other statistics, by the names of :class:`PositionStatistics`."""
        return self._replace(predicted=self.predicted._replace(**changed))

    def counted(self, tokens: Tensor, decided: Tensor | None = None) -> Tensor:
        """Return the positions by which a canvas is judged, [R, C], bool.

        These are all valid positions, or those up to the first end token that is not the prompt's:
        the rest is discarded.

        Args:
            tokens: [R, C], int64, tokens of the canvas.
            decided: [R, C], bool, positions at which an end token counts; ``None`` for all.
        """
        if self.end_tokens is None:
            return self.valid
        is_end = (tokens[..., None] == self.end_tokens[:, None]).any(dim=-1) & ~self.known
        if decided is not None:
            is_end = is_end & decided
        return self.valid & (is_end.cumsum(dim=-1) - is_end.long() == 0)


class StepDecision(NamedTuple):
    """Decision of a rule about each canvas.

    Attributes:
        keep: [R, C], bool, positions whose token enters the next step; the rest is noise again.
        tokens: [R, C], int64, the token at kept positions.
        result: [R, C], int64, tokens to emit if this was the canvas's last step; at fixed positions
            those of the canvas.
        done: [R], bool, true if the canvas has converged.
        memory: New memory of the rule, by name, in the shapes of :class:`Memory`.
        has_final_kv: [R], bool, true if the keys and values that this pass wrote are those of
            ``result``; ``None`` if they never are.
        num_final: [R], int32, leading positions that a canvas has emitted once it is done, given
            ones among them; ``None`` for all.
    """

    keep: Tensor
    tokens: Tensor
    result: Tensor
    done: Tensor
    memory: Tensors
    has_final_kv: Tensor | None = None
    num_final: Tensor | None = None


class Memory(NamedTuple):
    """Tensor that a rule keeps for each canvas from step to step; 0 when a canvas begins.

    Attributes:
        dtype: Type of its elements.
        per: Unit of an element: a canvas, [R]; a position of a canvas, [R, C]; a step of a canvas
            up to the server's cap, [R, N].
    """

    dtype: torch.dtype
    per: Literal["canvas", "position", "step"] = "canvas"


def in_budget(ascending: Tensor, budget: Tensor) -> Tensor:
    """Return the longest prefix whose sum, less its largest number, is at most a budget, [R, C],
    bool.

    Args:
        ascending: [R, C], float32, at least 0, sorted; infinite ones are in no budget.
        budget: [R], float32.
    """
    return ascending.cumsum(dim=-1) - ascending <= budget[:, None]


def places(order: Tensor) -> Tensor:
    """Return the place of each position in an order of them, [R, C], int64, the inverse of
    ``order``.

    Args:
        order: [R, C], int64, positions, the first one first.
    """
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def is_first(canvas: Tensor) -> Tensor:
    """[C], bool: the first position of canvases, [R, C]."""
    return torch.arange(canvas.shape[-1], device=canvas.device) == 0


def keep_first_token(inputs: StepInputs) -> StepInputs:
    """Return the inputs of a draft: what is drawn and likeliest at a canvas's first position is its
    token.
    """
    first = is_first(inputs.canvas)
    return inputs.with_predicted(
        candidate=torch.where(first, inputs.canvas, inputs.predicted.candidate),
        argmax=torch.where(first, inputs.canvas, inputs.predicted.argmax),
    )


class DecodingRule(ABC):
    """Base of decoding rules; an instance holds the options that a family fixes.

    Attributes:
        settings: Settings of servers and requests, by name.
        defaults: Values of settings that no checkpoint is published with, by name.
        presets: Sets of settings that go together, by name.
        memory: Tensors that are kept of a canvas from step to step, by name.
        refused_fields: Request fields that the rule cannot honour, each with the reason and the
            remedy.
        refused_settings: Settings of the server that the rule cannot honour, each with the reason.
        num_choices: Number of the likeliest tokens per position that a step needs; 0 if the
            likeliest and the drawn one suffice.
        can_finish_kv: True if the last step's keys and values may be those of the result, so that
            no pass need encode it.
        draws_positions: True if a step draws which positions it reveals.
        judges_filtered: True if a step's entropies are those of what the request's filters keep.
        named_tokens: Token ids whose probabilities a step needs.
        ends_thoughts: True if the token that ends a thought may be made likelier.
        judges_to_end: True if a canvas is always judged by its positions up to its first end token,
            whatever the server's ``converge_at_end`` is.
        revises: True if a token other than noise may be replaced in a canvas that begins with it,
            where noise is a mask.
    """

    settings: Mapping[str, Setting | Choice]
    defaults: ClassVar[Values] = {}
    presets: Mapping[str, Values] = {}
    memory: Mapping[str, Memory] = {}
    refused_fields: ClassVar[Mapping[str, str]] = {}
    refused_settings: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("draft_length", "draft_steps", "draft_adapter"),
        'which makes no drafts, as rule="linear_spec" does',
    )
    num_choices: ClassVar[int] = 0
    can_finish_kv: ClassVar[bool] = False
    draws_positions: ClassVar[bool] = False
    judges_filtered: ClassVar[bool] = False
    named_tokens: tuple[int, ...] = ()
    ends_thoughts: ClassVar[bool] = False
    judges_to_end: bool = False
    revises: ClassVar[bool] = False

    def reads_margin(self, values: Values) -> bool:
        """Return true if the steps of a request with these settings need
        :attr:`StepInputs.margin`.
        """
        return False

    def forbidden(self, values: Values) -> tuple[int, ...]:
        """Return the token ids that a request with these settings never draws."""
        return ()

    def contradiction(self, values: Values) -> tuple[tuple[str, ...], str] | None:
        """Return the settings whose values do not go together, and the reason; ``None`` if all
        do.
        """
        return None

    def faster(self, values: Values, max_steps: int, length: int) -> Values:
        """Return settings that decide several tokens a step where ``values`` decide one; else none.

        Args:
            values: Values of all settings.
            max_steps: The step cap.
            length: Positions of a canvas.
        """
        return {}

    def read(self, canvas: Tensor, num_known: Tensor, settings: Tensors) -> Tensor | None:
        """Return the positions of a canvas whose statistics a step reads, [R, C], bool; ``None``
        for all.

        Args:
            canvas: [R, C], int64, as the step finds it.
            num_known: [R], int32, leading positions that are given.
            settings: Settings of the rule, [R] each.
        """
        return None

    def temperatures(
        self,
        settings: Tensors,
        step: Tensor,
        max_steps: Tensor,
        requested: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the temperatures of judging and of drawing, two float32 tensors [R].

        Logits are divided by the first when the step judges them, and by both when it draws from
        them; a second temperature of 0 takes the likeliest token. By default tokens are judged in
        the distribution they are drawn from, at temperature 0 by the plain one.

        Args:
            settings: Settings of the rule, [R] each.
            step: [R], int32, steps of each canvas before this one.
            max_steps: [R], int32, the step cap.
            requested: [R], float32, the ``temperature`` of the requests.
        """
        one = torch.ones_like(requested)
        is_greedy = requested == 0
        return torch.where(is_greedy, one, requested), torch.where(is_greedy, requested, one)

    @abstractmethod
    def decide(self, inputs: StepInputs, settings: Tensors, memory: Tensors) -> StepDecision:
        """Decide about each canvas after a step.

        Args:
            inputs: Results of the pass.
            settings: Settings of the rule, [R] each.
            memory: Memory as the previous step left it.
        """
