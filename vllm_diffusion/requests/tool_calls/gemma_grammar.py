"""Gemma's own format of a tool call as a grammar for xgrammar.

``<|tool_call>call:name{key:value,...}<tool_call|>``, with ``<|"|>`` around strings. The three markers
are tokens of their own, and only those tokens open and close: no string may spell one out, since the
reader of a whole answer sees nothing but its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_diffusion.requests.tool_calls.bare_values import (
    UnwritableError,
    number_rules,
    pattern_rules,
)
from vllm_diffusion.requests.tool_calls.schema_reader import ToolSchemaError
from vllm_diffusion.requests.tool_calls.value_forms import (
    ANYTHING,
    Form,
    Items,
    Members,
    Number,
    Scalar,
    Text,
    Value,
)

CALL_START = "<|tool_call>"
CALL_END = "<tool_call|>"
QUOTE = '<|"|>'
# Beyond 4,300 digits Python reads no integer, and beyond 1e308 no number.
_BASIC_RULES = """\
integer ::= "-"? ("0" | [1-9] [0-9]{0,17})
number ::= integer ("." [0-9]{1,17})? ([eE] [+-]? [0-9]{1,2})?
boolean ::= "true" | "false"
null ::= "null"
key ::= [a-zA-Z_] [a-zA-Z0-9_]{0,63}
anything ::= string | number | boolean | null | list | record
list ::= "[" (anything ("," anything)*)? "]"
record ::= "{" (key ":" anything ("," key ":" anything)*)? "}\""""
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


def call_grammar(name: str, arguments: Members, markers: Markers) -> str:
    """Write the grammar of one tool's call, between its markers, as EBNF of xgrammar.

    Args:
        name: Name of the tool.
        arguments: Parameters of the tool.
        markers: Markers of the tokenizer.

    Raises:
        ToolSchemaError: If the format cannot write the name, or none of the listed values.
    """
    if not _FUNCTION_NAME.fullmatch(name):
        raise ToolSchemaError("the name must be of letters, digits, underscores and dashes")
    rules = _Rules(markers)
    body = rules.members(arguments)
    return "\n".join(
        [f"root ::= {_quoted(f'call:{name}')} {body}", *rules.lines, rules.string, _BASIC_RULES]
    )


class _Rules:
    """Rules that are collected while the values of one tool are written."""

    def __init__(self, markers: Markers) -> None:
        self._markers = markers
        self._quote = f"Token({markers.quote})"
        self.lines: list[str] = []
        excluded = ", ".join(map(_quoted, markers.texts))
        # Compiles a hundred times faster than the same said with rules.
        self.string = (
            f"string ::= {self._quote} text {self._quote}\n"
            f"text ::= TagDispatch(loop_after_dispatch=false, excludes=({excluded}))"
        )

    def _rule(self, body: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name} ::= {body}")
        return name

    def _rules(self, write: Callable[..., list[str]], *arguments: Any) -> str:
        """Add the rules that ``write`` makes, and return the name of the first."""
        name = f"r{len(self.lines)}"
        try:
            self.lines += write(name, *arguments)
        except UnwritableError as error:
            raise ToolSchemaError(f"a value {error}") from None
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
            return self._rules(number_rules, name == "integer", dict(form.bounds))
        return name if form.values is None else self._listed(form)

    def _listed(self, form: Scalar) -> str:
        assert form.values is not None
        written = []
        for value in form.values:
            if not isinstance(value, str):
                written.append(_quoted(json.dumps(value)))
            elif not any(text in value for text in self._markers.texts):
                written.append(f"{self._quote} {_quoted(value)} {self._quote}")
        if not written:
            raise ToolSchemaError(
                f"{form.values[0]!r} is spelled like a special token, which no argument may hold"
            )
        return self._rule(" | ".join(written))

    def _string(self, form: Text) -> str:
        if form == Text():
            return "string"
        if form.max_length == 0:
            return f"({self._quote} {self._quote})"
        first = "".join(sorted({text[0] for text in self._markers.texts}))
        if form.pattern is not None:
            written = self._rules(pattern_rules, form.pattern, first)
            return f"({self._quote} {written} {self._quote})"
        most = "" if form.max_length is None else form.max_length
        # A limit counts characters, so none of them may begin a special token's spelling.
        text = f"{_other_than(first)}{{{form.min_length},{most}}}"
        return self._rule(f"{self._quote} {text} {self._quote}")

    def _items(self, form: Items) -> str:
        item, low, high = self.value(form.item), form.min_items, form.max_items
        if high == 0:
            return '"[]"'
        more = f"{max(low - 1, 0)},{'' if high is None else high - 1}"
        some = f'{item} ("," {item}){{{more}}}'
        return self._rule(f'"[" {some} "]"' if low else f'"[" ({some})? "]"')

    def members(self, form: Members) -> str:
        if form.others is not None:
            other = "string" if form.others.forms else "anything"
            pair = f'key ":" {other}'
            return self._rule(f'"{{" ({pair} ("," {pair})*)? "}}"')
        pairs = [
            (self._rule(f"{_quoted(f'{name}:')} {self.value(value)}"), name in form.required)
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


def _quoted(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def _other_than(characters: Collection[str]) -> str:
    """A class of every character but these; a negated one would let half a surrogate pair in."""
    ranges, low = [], 0
    for code in [*sorted(map(ord, characters)), 0xD800, 0x110000]:
        if low < code:
            ranges.append(f"\\U{low:08x}-\\U{code - 1:08x}")
        low = 0xE000 if code == 0xD800 else code + 1
    return f"[{''.join(ranges)}]"
