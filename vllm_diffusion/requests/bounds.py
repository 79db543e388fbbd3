"""Bounds of a request's values: what the engine's process, its workers and its device can take.

vLLM checks what a sampling parameter means. What it lets through still has to fit an element of a
tensor, a message or the memory: a number that does not either raises in the worker, which ends the
engine, or becomes an infinity of float32 there, of which a distribution makes NaN. The engine
validates sampling parameters again when it decodes them, in the thread that receives all requests: what is wrong
there has no client any more who could be answered.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_diffusion.requests.refusals import refuse

if TYPE_CHECKING:
    from vllm import SamplingParams

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
UINT64_MAX = 2**64 - 1


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
        """Return what to say of ``value`` after its field's name; ``None`` if it is within."""
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
        A field's name, what to say after it, and its value.
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


# llguidance, which vLLM asks where xgrammar declines, unrolls arrays as it checks them: 100,000 items
# take it 2 s and 100 MB, 1,000,000 more than a minute, 1,000,000,000 all memory.
MOST_ITEMS = 10_000
_COUNTS = ("minItems", "maxItems")
# It has a state for each remainder: 10,000 take 0.1 s, 1,000,000 take 20 s.
MOST_REMAINDERS = 10_000


def schema_problem(structured_outputs: Any) -> str | None:
    """Return why a constraint's schemas are not compiled; ``None`` if they may be.

    Args:
        structured_outputs: vLLM's ``StructuredOutputsParams``.
    """
    for text in (structured_outputs.json, structured_outputs.structural_tag):
        try:
            schema = json.loads(text) if isinstance(text, str) else text
        except RecursionError:
            return f"is nested too deeply; up to {MOST_LEVELS} levels are supported."
        except ValueError:
            # vLLM names what is wrong with it.
            continue
        # A schema that is no text has been looked at with its body, but for vllm.LLM.
        if problem := _unsendable(schema):
            return problem
        num_items = sum(_counts(schema))
        if num_items > MOST_ITEMS:
            return (
                f"has a schema whose minItems and maxItems add up to {num_items}; up to "
                f"{MOST_ITEMS} are supported: lower them, or leave maxItems out."
            )
        # A value may have to be a multiple of several.
        if math.lcm(*_steps(schema)) > MOST_REMAINDERS:
            return (
                "has a schema whose multipleOf is too large for a grammar, alone or with others: without "
                f"zeros at the end and decimal points their least common multiple may be "
                f"{MOST_REMAINDERS}; lower it, or leave it out."
            )
    return None


def _parts(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a schema, however deep."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            yield part
            pending += part.values()
        elif isinstance(part, list):
            pending += part


def _counts(schema: Any) -> Iterator[int]:
    """Yield the counts of a schema."""
    for part in _parts(schema):
        for name in _COUNTS:
            if isinstance(count := part.get(name), (int, float)) and count > 0:
                yield int(min(count, 10**18))


def _steps(schema: Any) -> Iterator[int]:
    """Yield the digits of the steps of a schema, less the zeros at their ends."""
    for part in _parts(schema):
        step = part.get("multipleOf")
        if isinstance(step, (int, float)) and math.isfinite(step) and step > 0:
            digits = "".join(map(str, Decimal(str(step)).as_tuple().digits))
            yield int(digits.rstrip("0"))


def text_problems(params: Any) -> Iterator[tuple[str, str]]:
    """Find fields with text that is none, which cannot be sent to the engine's process.

    Args:
        params: vLLM's ``SamplingParams``.

    Yields:
        A field's name, and what to say after it.
    """
    fields = {
        "stop": params.stop,
        "bad_words": params.bad_words,
        "vllm_xargs": params.extra_args,
    }
    for field, value in fields.items():
        try:
            # Objects and numbers that no message holds are left to vLLM.
            with contextlib.suppress(OverflowError):
                msgspec.msgpack.encode(value, enc_hook=lambda _: None)
        except UnicodeEncodeError:
            yield field, "holds half of a surrogate pair, which no text contains; take it out."


# Python's JSON reads and writes some nine hundred levels, and templates need some of them.
MOST_LEVELS = 500


def check_fields(request: Any) -> None:
    """Refuse a value, however deep in a body, that cannot be sent to the engine's process or written as text.

    Args:
        request: Body of a request, as vLLM's protocol read it.

    Raises:
        VLLMValidationError: Naming the body's field.
    """
    for field, value in _members(request):
        if problem := _unsendable(value):
            refuse(str(field), problem)


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return what a value of a body holds, by key."""
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, (list, tuple, set)):
        return enumerate(value)
    if hasattr(value, "model_fields_set"):
        return [*vars(value).items(), *(getattr(value, "model_extra", None) or {}).items()]
    if is_dataclass(value):
        return vars(value).items()
    return ()


def _unsendable(value: Any) -> str | None:
    """Return why a field's value cannot be sent, the rest of a sentence."""
    pending = [("", value, 0)]
    while pending:
        key, part, level = pending.pop()
        if level > MOST_LEVELS:
            return f"is nested too deeply; up to {MOST_LEVELS} levels are supported."
        if isinstance(part, int) and not INT64_MIN <= part <= UINT64_MAX:
            return "holds an integer beyond 64 bits; lower it, or send it as a string."
        if isinstance(part, str):
            if not part.isascii() and any("\ud800" <= character <= "\udfff" for character in part):
                return "holds half of a surrogate pair, which no text contains; take it out."
            if key == "arguments":
                # A call of an earlier turn, which templates write out.
                try:
                    pending.append(("", json.loads(part), level + 1))
                except RecursionError:
                    return f"has arguments that are nested too deeply; up to {MOST_LEVELS} levels are supported."
                except ValueError:
                    continue
            continue
        for name, inner in _members(part):
            pending.append((name, inner, level + 1))
            if isinstance(name, str):
                pending.append(("", name, level + 1))
    return None


# How msgspec ends the description of an error: "... - at `$.max_tokens`", "... - at `key` in `$.logit_bias`".
_FIELD = re.compile(r"`\$\.(\w+)")


def check_decodable(params: SamplingParams) -> None:
    """Encode sampling parameters for the engine and decode them as the engine will.

    vLLM validated them before our checks lowered ``max_tokens``, and never checks the types of what Python sets.

    Args:
        params: Parameters of the request. An encoding that fails is left to vLLM, which answers the
            client: it fails in this process.

    Raises:
        VLLMValidationError: Naming the field that the engine would refuse.
    """
    from vllm import SamplingParams
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    try:
        message = MsgpackEncoder().encode(params)
    except (TypeError, ValueError, OverflowError):
        return
    try:
        MsgpackDecoder(SamplingParams).decode(message)
    except msgspec.ValidationError as error:
        match = _FIELD.search(str(error))
        field = match.group(1) if match else "sampling_params"
        value = getattr(params, field, None)
        refuse(field, f"cannot be read by the engine: {error}.", value)
