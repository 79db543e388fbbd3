"""Bounds of a request's values: what the engine's process, its workers and its device can take.

vLLM checks what a sampling parameter means. What it lets through still has to fit an element of a
tensor, a message or the memory: a number that does not either raises in the worker, which ends the
engine, or becomes an infinity of float32 there, of which a distribution makes NaN. The engine
validates sampling parameters again when it decodes them, in the thread that receives all requests:
what is wrong there has no client any more who could be answered.
"""

from __future__ import annotations

import contextlib
import json
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_diffusion.requests.refusals import refuse

if TYPE_CHECKING:
    from vllm import SamplingParams

# A field's name, what to say after it, and its value; ``None`` where the message does not repeat
# it.
Problem = tuple[str, str, Any]

# What vLLM's processors have room for; a worker that is given more ends with an error.
_MOST_ENTRIES = {"allowed_token_ids": 1024, "logit_bias": 1024, "stop_token_ids": 127}
# Characters of a stop string or a bad word: 5 million take the tokenizer 20 s.
MOST_OF_A_WORD = 10_000
# Characters of all of them: each answer of a request takes its own copy, in tokens, to the engine.
MOST_OF_WORDS = 32_000
_HALF_A_PAIR = "holds half of a surrogate pair, which no text contains; take it out."
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


# Bounds of vLLM's SamplingParams. Fields that vLLM bounds more tightly are here too, since vllm.LLM
# lets them be set past its checks.
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
# Numbers of ``repetition_detection``.
_REPETITION_DETECTION = ("max_pattern_size", "min_pattern_size", "min_count")


def problems(params: Any) -> Iterator[Problem]:
    """Find lists and texts of a request that are too long, text that is none, and numbers out of
    bounds.

    Args:
        params: vLLM's ``SamplingParams``.
    """
    for field, most in _MOST_ENTRIES.items():
        num_entries = len(getattr(params, field) or ())
        if num_entries > most:
            yield field, f"may have at most {most} entries; got {num_entries}.", None
    for field in ("stop", "bad_words"):
        lengths = [len(text) for text in getattr(params, field) or ()]
        for length, most, what in (
            (max(lengths, default=0), MOST_OF_A_WORD, "a text"),
            (sum(lengths), MOST_OF_WORDS, "all texts together"),
        ):
            if length > most:
                yield field, f"may have {most} characters in {what}; got {length}.", None
    yield from text_problems(params)
    yield from sampling_problems(params)


def sampling_problems(params: Any) -> Iterator[Problem]:
    """Find the numbers of a request that are out of bounds."""
    for field, bounds in SAMPLING_PARAMS.items():
        value = getattr(params, field)
        if value is not None and (problem := bounds.problem(value)):
            yield field, problem, value
    if params.seed is not None:
        # vLLM numbers the answers' seeds from the request's on.
        why = f"its {params.n} answers get the integers from it on"
        why = why if params.n > 1 else "it is an integer of 64 bits"
        seeds = NumberBounds(INT64_MIN, INT64_MAX - params.n + 1, why)
        if problem := seeds.problem(params.seed):
            yield "seed", problem, params.seed
    for token, bias in (params.logit_bias or {}).items():
        if problem := LOGIT_BIAS.problem(bias):
            yield "logit_bias", f"of token {token} {problem}", bias
    if params.repetition_detection is not None:
        for name in _REPETITION_DETECTION:
            value = getattr(params.repetition_detection, name)
            if problem := _sent(0).problem(value):
                yield "repetition_detection", f"{name} {problem}", value


# What a schema may hold: OpenAI's structured outputs have up to 5,000 properties. Python reads a
# part in 0.3 ms.
MOST_PARTS = 6_000
# Objects and lists of a body: a schema of the most parts and its messages fit. vLLM's protocol
# reads an item of /v1/responses, the dearest of all, in 0.12 ms.
MOST_OBJECTS = 6_400
# Keys of a body, five of each of these objects: one that no protocol knows takes 4 us, for which
# nobody else is served.
MOST_KEYS = 32_000
# llguidance has a grammar of each way to leave properties out: 1,000 take 0.1 s and 7 ms a token,
# 5,000 take 3 s and 160 ms (a vocabulary of 262,144).
MOST_OPTIONAL = 1_000
# It unrolls arrays: 100,000 items take 2 s and 100 MB.
MOST_ITEMS = 10_000
# It has a state for each remainder: 5,000 take 30 ms, and from some 9,000 on it gives up.
MOST_REMAINDERS = 5_000
MOST_CHOICES = 10_000
# Answers that one body may ask for, over all its prompts: 128,000 took 25 s and 550 MB.
MOST_ANSWERS = 2_048
# Characters of a schema, expression, grammar or list of choices.
MOST_CONSTRAINT = 1_000_000


def text_problems(params: Any) -> Iterator[Problem]:
    """Find fields with text that is none, which cannot be sent to the engine's process."""
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
            yield field, _HALF_A_PAIR, None


# Python's JSON reads and writes some nine hundred levels, and templates need some of them.
MOST_LEVELS = 500


def members(value: Any) -> Iterable[tuple[Any, Any]]:
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


def unsendable(value: Any) -> str | None:
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
                return _HALF_A_PAIR
            if key == "arguments":
                # A call of an earlier turn, which templates write out.
                try:
                    pending.append(("", json.loads(part), level + 1))
                except RecursionError:
                    return f"has arguments that are nested too deeply; up to {MOST_LEVELS} levels are supported."
                except ValueError:
                    continue
            continue
        if isinstance(part, list) and {*map(type, part)} <= {int, float}:
            # Token ids, of which a prompt may have a million.
            part = [min(part), max(part)] if part else []
        for name, inner in members(part):
            pending.append((name, inner, level + 1))
            if isinstance(name, str):
                pending.append(("", name, level + 1))
    return None


# How msgspec ends the description of an error: "... - at `$.max_tokens`", "... - at `key` in
# `$.logit_bias`".
_FIELD = re.compile(r"`\$\.(\w+)")


def check_decodable(params: SamplingParams) -> None:
    """Encode sampling parameters for the engine and decode them as the engine will.

    vLLM validated them before our checks lowered ``max_tokens``, and never checks the types of what
    Python sets.

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
