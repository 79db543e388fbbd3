"""Gemma's own format of a tool call as rules of a Lark grammar for llguidance.

``<|tool_call>call:name{key:value,...}<tool_call|>``, with ``<|"|>`` around strings. The three
markers are tokens of their own, and only those tokens open and close: no string may spell one out,
since the reader of a whole answer sees nothing but its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_diffusion.requests.tool_calls.leaf_values import (
    UnwritableError,
    escaped,
    string_terminal,
)
from vllm_diffusion.requests.tool_calls.schema_reader import (
    ANYTHING,
    Form,
    Items,
    Members,
    Number,
    Scalar,
    Text,
    ToolSchemaError,
    Value,
)
from vllm_diffusion.requests.tool_calls.tag_grammar import MARK

CALL_START = "<|tool_call>"
CALL_END = "<tool_call|>"
QUOTE = '<|"|>'
# Rules that all tools have in common. Beyond 4,300 digits Python reads no integer, and beyond 1e308
# no number. A key is one that the reader takes as it stands, such as $gt, Content-Type or Due date,
# without a quotation mark, as JSON would begin it.
_BASIC_RULES = r"""
integer: /-?(0|[1-9][0-9]{0,17})/
number: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/
boolean: "true" | "false"
null: "null"
key: KEY
KEY: /[^\s:,{}\[\]<"\x00-\x1f\x7f]( ?[^\s:,{}\[\]<"\x00-\x1f\x7f]){0,63}/
anything: string | number | boolean | null | list | record
list: "[" (anything ("," anything)*)? "]"
record: "{" (key ":" anything ("," key ":" anything)*)? "}"
""".strip()
_FUNCTION_NAME = re.compile(r"[^\s{}()<:]+")


@dataclass(frozen=True)
class Markers:
    """Tokens of a tokenizer with which a call is written.

    Attributes:
        call_start: Id of ``<|tool_call>``.
        call_end: Id of ``<tool_call|>``.
        quote: Id of ``<|"|>``.
        texts: Spellings of special tokens, which no string may contain.
    """

    call_start: int
    call_end: int
    quote: int
    texts: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Any, vocab: Mapping[str, int]) -> Markers | None:
        """Return the markers of a tokenizer; ``None`` if it has not got them."""
        if not {CALL_START, CALL_END, QUOTE} <= vocab.keys():
            return None
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        texts = {CALL_START, CALL_END, QUOTE} | {token.content for token in added if token.special}
        return cls(vocab[CALL_START], vocab[CALL_END], vocab[QUOTE], tuple(sorted(texts)))


def call_grammar(name: str, arguments: Members, markers: Markers, prefix: str) -> str:
    """Write the grammar of one tool's call, between its markers, as marked rules of Lark.

    Args:
        name: Name of the tool.
        arguments: Parameters of the tool.
        markers: Markers of the tokenizer.
        prefix: Name of its first rule, in lower case, with which the names of its own rules begin.

    Raises:
        ToolSchemaError: If the format cannot write the name, or none of the listed values.
    """
    if not _FUNCTION_NAME.fullmatch(name):
        raise ToolSchemaError("the name must be of letters, digits, underscores and dashes")
    rules = _Rules(markers, prefix)
    body = rules.members(arguments)
    first = f"{prefix}: {_literal(f'call:{name}')} {body}"
    return "\n".join([MARK, first, *rules.lines, rules.string, _BASIC_RULES])


class _Rules:
    """Rules that are collected while the values of one tool are written."""

    def __init__(self, markers: Markers, prefix: str) -> None:
        self._markers = markers
        self._prefix = prefix
        self._quote = f"<[{markers.quote}]>"
        self.lines: list[str] = []
        spelled = "|".join(map(escaped, markers.texts))
        # A complement alone would hold bytes that are not characters.
        text = f"/(?s:.*)/ & ~/(?s:.*)({spelled})(?s:.*)/"
        self.string = f"string: {self._quote} TEXT {self._quote}\nTEXT: {text}"

    def _rule(self, body: str) -> str:
        name = f"{self._prefix}_{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _terminal(self, expression: str) -> str:
        """Add a terminal, and return its name."""
        name = f"{self._prefix}_{len(self.lines)}".upper()
        self.lines.append(f"{name}: {expression}")
        return name

    def value(self, value: Value) -> str:
        if value is ANYTHING or not value.forms:
            return "anything"
        written = [self._form(name, form) for name, forms in value.forms.items() for form in forms]
        return written[0] if len(written) == 1 else f"({' | '.join(written)})"

    def _form(self, name: str, form: Form) -> str:
        if isinstance(form, Members):
            return self.members(form)
        if isinstance(form, Items):
            return self._items(form)
        if isinstance(form, Text):
            return self._string(form)
        if isinstance(form, Number):
            return self._rule(form.rule)
        return name if form.values is None else self._listed(form)

    def _listed(self, form: Scalar) -> str:
        assert form.values is not None
        values = [value for value in form.values if not self._has_marker(value)]
        if not values:
            raise ToolSchemaError(
                f"{form.values[0]!r} is spelled like a special token, which no argument may hold"
            )
        # A rule has at most 2,000 alternatives, an expression more.
        strings = "|".join(escaped(value) for value in values if isinstance(value, str))
        bare = [value for value in values if not isinstance(value, (str, list, dict))]
        literals = "|".join(escaped(json.dumps(value)) for value in bare)
        written = [self._constant(value) for value in values if isinstance(value, (list, dict))]
        if bare:
            written.append(self._terminal(f"/{literals}/"))
        if any(isinstance(value, str) for value in values):
            written.append(f"{self._quote} {self._terminal(f'/{strings}/')} {self._quote}")
        return self._rule(" | ".join(written))

    def _has_marker(self, value: Any) -> bool:
        if isinstance(value, dict):
            return any(map(self._has_marker, [*value, *value.values()]))
        if isinstance(value, list):
            return any(map(self._has_marker, value))
        return isinstance(value, str) and any(text in value for text in self._markers.texts)

    def _constant(self, value: Any) -> str:
        """Return the writing of a listed value."""
        comma = ' "," '
        if isinstance(value, dict):
            pairs = [f"{_literal(f'{key}:')} {self._constant(item)}" for key, item in value.items()]
            return f'"{{" {comma.join(pairs)} "}}"'
        if isinstance(value, list):
            return f'"[" {comma.join(map(self._constant, value))} "]"'
        if isinstance(value, str):
            return f"{self._quote} {self._terminal(f'/{escaped(value)}/')} {self._quote}"
        return _literal(json.dumps(value))

    def _string(self, form: Text) -> str:
        if form == Text():
            return "string"
        # None of its characters may begin a special token's spelling.
        first = "".join(sorted({text[0] for text in self._markers.texts}))
        try:
            terminal = string_terminal(form.pattern, form.min_length, form.max_length, first)
        except UnwritableError as error:
            raise ToolSchemaError(f"a string {error}") from None
        return f"({self._quote} {self._terminal(terminal)} {self._quote})"

    def _items(self, form: Items) -> str:
        item, low, high = self.value(form.item), form.min_items, form.max_items
        if high == 0:
            return self._rule('"[" "]"')
        more = f"{max(low - 1, 0)},{'' if high is None else high - 1}"
        some = item if high == 1 else f'{item} ("," {item}){{{more}}}'
        return self._rule(f'"[" {some} "]"' if low else f'"[" ({some})? "]"')

    def members(self, form: Members) -> str:
        if form.others is not None:
            pair = f'key ":" {self.value(form.others)}'
            return self._rule(f'"{{" ({pair} ("," {pair})*)? "}}"')
        pairs = [
            (self._rule(f"{_literal(f'{name}:')} {self.value(value)}"), name in form.required)
            for name, value in form.properties.items()
        ]
        return self._rule(f'"{{" {self._pairs(pairs)} "}}"')

    def _pairs(self, pairs: Sequence[tuple[str, bool]]) -> str:
        """Pairs in their order, with commas between those that are there."""
        first_required = next((i for i, (_, required) in enumerate(pairs) if required), None)
        if first_required is not None:
            before = [f'({pair} ",")?' for pair, _ in pairs[:first_required]]
            after = [
                f'"," {pair}' if required else f'("," {pair})?'
                for pair, required in pairs[first_required + 1 :]
            ]
            return " ".join([*before, pairs[first_required][0], *after])
        alternatives = ['""']
        rest = '""'
        for pair, _ in reversed(pairs):
            alternatives.append(f"{pair} {rest}")
            rest = self._rule(f'("," {pair})? {rest}')
        return f"({' | '.join(alternatives)})"


def _literal(text: str) -> str:
    """Return the expression of a text, which says every character in ASCII."""
    return f"/{escaped(text)}/"
