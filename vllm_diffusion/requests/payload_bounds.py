"""Texts and schemas that vLLM takes and that end its API process, or the way to its engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

# llguidance, which vLLM asks where xgrammar declines, unrolls arrays as it checks them: 100,000 items
# take it 2 s and 100 MB, 1,000,000 more than a minute, 1,000,000,000 all memory.
MOST_ITEMS = 10_000
_COUNTS = ("minItems", "maxItems")


def schema_problem(structured_outputs: Any) -> str | None:
    """Return why a constraint's schemas are not compiled; ``None`` if they may be.

    Args:
        structured_outputs: vLLM's ``StructuredOutputsParams``.
    """
    for text in (structured_outputs.json, structured_outputs.structural_tag):
        try:
            schema = json.loads(text) if isinstance(text, str) else text
        except ValueError:
            # vLLM says what is wrong with it.
            continue
        num_items = sum(_counts(schema))
        if num_items > MOST_ITEMS:
            return (
                f"has a schema whose minItems and maxItems add up to {num_items}; up to "
                f"{MOST_ITEMS} are supported: lower them, or leave maxItems out."
            )
    return None


def _counts(schema: Any) -> Iterator[int]:
    """Yield the counts of a schema, however deep."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            for name in _COUNTS:
                if isinstance(count := part.get(name), (int, float)) and count > 0:
                    yield int(min(count, 10**18))
            pending += part.values()
        elif isinstance(part, list):
            pending += part


def text_problems(params: Any) -> Iterator[tuple[str, str]]:
    """Find fields with text that is none, which cannot be sent to the engine's process.

    Args:
        params: vLLM's ``SamplingParams``.

    Yields:
        A field's name, and what to say behind it.
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
