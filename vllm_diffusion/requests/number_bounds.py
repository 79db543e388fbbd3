"""The numbers that a request may carry: what the device, or the way to it, holds.

vLLM checks what a sampling parameter means. What it lets through still has to fit an element of a
tensor: a number that does not either raises in the worker, which ends the engine, or becomes an
infinity of float32 there, of which a distribution makes NaN.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


@dataclass(frozen=True)
class NumberBounds:
    """Bounds of a number.

    Attributes:
        low: Smallest allowed value.
        high: Largest allowed value.
        why: Reason of the bounds, the end of a sentence.
    """

    low: float
    high: float
    why: str

    def problem(self, value: float) -> str | None:
        """Return what to say of ``value`` behind its field's name; ``None`` if it is within."""
        # A NaN is within nothing.
        if self.low <= value <= self.high:
            return None
        return (
            f"must be between {reprlib.repr(self.low)} and {reprlib.repr(self.high)}, since {self.why}; got "
            f"{reprlib.repr(value)}."
        )


def _sent(low: int) -> NumberBounds:
    """Bound a number by the integers of the engine's message; the worker lowers larger ones."""
    return NumberBounds(low, INT64_MAX, "the engine is sent numbers of 64 bits")


# Of vLLM's SamplingParams. Fields that vLLM bounds more tightly itself are here for those who set
# them past its checks, as vllm.LLM lets them.
SAMPLING_PARAMS: Mapping[str, NumberBounds] = {
    "top_k": _sent(-1),
    "max_tokens": _sent(1),
    "stream_interval": _sent(1),
    # Added to the length of the prompt, in int32.
    "min_tokens": NumberBounds(0, 2**30 - 1, "no answer is that long"),
    "temperature": NumberBounds(0.0, 2.0, "vLLM defines it there"),
    "top_p": NumberBounds(0.0, 1.0, "it is a probability"),
    "min_p": NumberBounds(0.0, 1.0, "it is a probability"),
    "presence_penalty": NumberBounds(-2.0, 2.0, "vLLM defines it there"),
    "frequency_penalty": NumberBounds(-2.0, 2.0, "vLLM defines it there"),
    # A logit of 30, where the model caps it, becomes 3,000 at most: float32 tells 2.4e-4 apart
    # there, a tenth of the finest threshold of a preset. From 1e5 on answers no longer change, and
    # at 1e39 and 1e-39 the logits are infinite.
    "repetition_penalty": NumberBounds(0.01, 100.0, "logits lose their digits beyond"),
}
# As far as a bias can push an id: a constraint's masks keep what it allows above the negative.
LOGIT_BIAS = NumberBounds(-1e4, 1e4, "an id is certain or impossible by then")
REPETITION_DETECTION: Mapping[str, NumberBounds] = {
    "max_pattern_size": _sent(0),
    "min_pattern_size": _sent(0),
    "min_count": _sent(0),
}


def sampling_problems(params: Any) -> Iterator[tuple[str, str, Any]]:
    """Find the numbers of a request that are out of bounds.

    Args:
        params: vLLM's ``SamplingParams``.

    Yields:
        A field's name, what to say behind it, and its value.
    """
    for field, bounds in SAMPLING_PARAMS.items():
        value = getattr(params, field)
        if value is not None and (problem := bounds.problem(value)):
            yield field, problem, value
    if params.seed is not None:
        # vLLM numbers the answers' seeds from the request's on.
        high = INT64_MAX - params.n + 1
        seeds = NumberBounds(INT64_MIN, high, f"its {params.n} answers get the integers from it on")
        if params.n == 1:
            seeds = NumberBounds(INT64_MIN, INT64_MAX, "it is an integer of 64 bits")
        if problem := seeds.problem(params.seed):
            yield "seed", problem, params.seed
    for token, bias in (params.logit_bias or {}).items():
        if problem := LOGIT_BIAS.problem(bias):
            yield "logit_bias", f"of token {token} {problem}", bias
    if params.repetition_detection is not None:
        for name, bounds in REPETITION_DETECTION.items():
            value = getattr(params.repetition_detection, name)
            if problem := bounds.problem(value):
                yield "repetition_detection", f"{name} {problem}", value
