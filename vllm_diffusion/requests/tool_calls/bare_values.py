"""Rules of xgrammar's EBNF for numbers within bounds and strings of a pattern, written bare.

xgrammar writes a range and an expression itself; its rules are taken over under other names. A string
of a call stands between two tokens, and what would spell one of them out is taken out of its classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

# Beyond 4,300 digits Python reads no integer.
MOST_INTEGER = 10**18 - 1
# Remainders that a grammar of multiples has a rule for, and values of a range that are listed.
MOST_REMAINDERS = 1000
_MOST_NUMBER = 10**15
_SURROGATES = (0xD800, 0xDFFF)
_ESCAPES = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0, "a": 7, "b": 8, "e": 27}
_LITERAL_OR_CLASS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|root(?:_\d+)*')
_CHARACTER = re.compile(
    r"\\U([0-9a-fA-F]{8})|\\u([0-9a-fA-F]{4})|\\x([0-9a-fA-F]{2})|\\(.)|(.)", re.S
)


class UnwritableError(ValueError):
    """A bound or a pattern that no grammar expresses, with the reason."""


def number_rules(name: str, is_integer: bool, bounds: Mapping[str, Any]) -> list[str]:
    """Write the rule ``name`` for numbers.

    Args:
        name: Name of the rule; those it needs begin with it.
        is_integer: True for integers, false for all numbers.
        bounds: ``minimum``, ``maximum``, ``exclusiveMinimum``, ``exclusiveMaximum`` and ``multipleOf``
            of a schema.

    Raises:
        UnwritableError: If no grammar expresses them, or no number is left.
    """
    from xgrammar import Grammar

    step = bounds.get("multipleOf")
    limits = {key: value for key, value in bounds.items() if key != "multipleOf"}
    if step is not None:
        return _multiples(name, step, limits)
    if is_integer:
        low, high = _integer_range(limits)
        schema = {"type": "integer", "minimum": low, "maximum": high}
    else:
        schema = {"type": "number", "minimum": -_MOST_NUMBER, "maximum": _MOST_NUMBER, **limits}
        if "exclusiveMinimum" in limits and "minimum" not in limits:
            del schema["minimum"]
        if "exclusiveMaximum" in limits and "maximum" not in limits:
            del schema["maximum"]
    try:
        written = str(Grammar.from_json_schema(schema))
    except RuntimeError:
        raise UnwritableError("allows no number that can be written") from None
    return _renamed(written, name)


def _integer_range(limits: Mapping[str, Any]) -> tuple[int, int]:
    """Return the least and the greatest integer within bounds."""
    low = max(
        math.ceil(max(limits.get("minimum", -MOST_INTEGER), -MOST_INTEGER)),
        math.floor(max(limits.get("exclusiveMinimum", -MOST_INTEGER - 1), -MOST_INTEGER - 1)) + 1,
    )
    high = min(
        math.floor(min(limits.get("maximum", MOST_INTEGER), MOST_INTEGER)),
        math.ceil(min(limits.get("exclusiveMaximum", MOST_INTEGER + 1), MOST_INTEGER + 1)) - 1,
    )
    if low > high:
        raise UnwritableError("allows no number")
    return low, high


def _multiples(name: str, step: float, limits: Mapping[str, Any]) -> list[str]:
    """Write the integers that are multiples: of a fraction of one, all are."""
    if float(step).is_integer():
        divisor = int(step)
    elif step > 0 and (1 / step).is_integer():
        divisor = 1
    else:
        raise UnwritableError("is neither an integer nor a part of one")
    low, high = _integer_range(limits)
    first = -(-low // divisor) * divisor
    if limits and (high - first) // divisor < MOST_REMAINDERS:
        if first > high:
            raise UnwritableError("leaves no number within the bounds")
        values = " | ".join(f'"{value}"' for value in range(first, high + 1, divisor))
        return [f"{name} ::= {values}"]
    if divisor == 1:
        return number_rules(name, True, limits)
    # With no more than a sign to leave out, and zero.
    is_unsigned = first in (0, divisor) and high == MOST_INTEGER
    if (limits and not is_unsigned) or divisor > MOST_REMAINDERS:
        raise UnwritableError(
            "cannot be written with these bounds, since it leaves too many numbers"
        )
    zero, sign = '"0" | ' if first <= 0 else "", "" if limits else '"-"? '
    rules = [f"{name} ::= {zero}{sign}{name}_start"]
    for remainder in ["start", *range(divisor)]:
        digits = [
            f'"{digit}" {name}_{(10 * (0 if remainder == "start" else remainder) + digit) % divisor}'
            for digit in range(remainder == "start", 10)
        ]
        ends = ['""'] if remainder == 0 else []
        rules.append(f"{name}_{remainder} ::= {' | '.join([*ends, *digits])}")
    return rules


def pattern_rules(name: str, pattern: str, forbidden: Collection[str]) -> list[str]:
    """Write the rule ``name`` for the strings in which an expression is found.

    Args:
        name: Name of the rule; those it needs begin with it.
        pattern: The expression, as JSON Schema has it.
        forbidden: Characters that no string may hold.

    Raises:
        UnwritableError: If xgrammar does not follow the expression, or it needs such a character.
    """
    from xgrammar import Grammar

    anchored = _anchored(pattern)
    try:
        written = str(Grammar.from_regex(anchored))
    except RuntimeError:
        raise UnwritableError("is an expression that cannot be followed") from None
    return _renamed(written, name, forbidden)


def _anchored(pattern: str) -> str:
    """Return an expression of whole strings, for one that is found anywhere without anchors."""
    body = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", pattern)
    begins, ends = body.startswith("^"), body.endswith("$")
    inner = pattern[begins : len(pattern) - ends]
    rest = body[begins : len(body) - ends]
    if "^" in rest or "$" in rest or re.search(r"\\[bB]", pattern.replace("\\\\", "")):
        raise UnwritableError("has an anchor in its middle")
    if (begins or ends) and _has_open_alternative(rest):
        raise UnwritableError("has an anchor that holds for one alternative only")
    anything = r"[\s\S]*"
    return f"{'' if begins else anything}({inner}){'' if ends else anything}"


def _has_open_alternative(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return True
    return False


def _renamed(grammar: str, name: str, forbidden: Collection[str] = ()) -> list[str]:
    """Take the rules that ``root`` needs, under names that begin with ``name``."""
    bodies = dict(line.split(" ::= ", 1) for line in grammar.splitlines() if " ::= " in line)
    needed, pending = [], ["root"]
    while pending:
        rule = pending.pop()
        if rule not in needed:
            needed.append(rule)
            parts = _LITERAL_OR_CLASS.findall(bodies[rule])
            pending += [part for part in parts if part[0] not in '"[']

    def write(match: re.Match[str]) -> str:
        part = match.group()
        if part.startswith('"'):
            if any(character in part for character in forbidden):
                raise UnwritableError("needs a character that begins a special token")
            return part
        if part.startswith("["):
            return _without(part, forbidden) if forbidden else part
        return part.replace("root", name, 1)

    return [
        f"{rule.replace('root', name, 1)} ::= {_LITERAL_OR_CLASS.sub(write, bodies[rule])}"
        for rule in needed
    ]


def _without(character_class: str, forbidden: Collection[str]) -> str:
    """Write a class without the forbidden characters and without halves of surrogate pairs."""
    body = character_class[1:-1]
    negated = body.startswith("^")
    codes: list[int | None] = []
    for match in _CHARACTER.finditer(body[negated:]):
        *numbers, escaped, plain = match.groups()
        number = next((int(digits, 16) for digits in numbers if digits), None)
        if number is None and plain == "-":
            codes.append(None)
        elif number is not None:
            codes.append(number)
        else:
            codes.append(_ESCAPES.get(escaped, ord(escaped)) if escaped else ord(plain))
    ranges = _ranges(codes)
    removed = [*((ord(character),) * 2 for character in forbidden), _SURROGATES]
    kept = [(0, 0x10FFFF)] if negated else ranges
    for low, high in [*(ranges if negated else ()), *removed]:
        kept = [
            (start, end)
            for first, last in kept
            for start, end in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if start <= end
        ]
    if not kept:
        raise UnwritableError("needs a character that begins a special token")
    return "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in kept) + "]"


def _ranges(codes: list[int | None]) -> list[tuple[int, int]]:
    """Read the members of a class; ``None`` is a dash."""
    ranges, i = [], 0
    while i < len(codes):
        low = codes[i] if codes[i] is not None else ord("-")
        assert low is not None
        if i + 2 < len(codes) and codes[i + 1] is None and codes[i + 2] is not None:
            ranges.append((low, codes[i + 2] or 0))
            i += 3
        else:
            ranges.append((low, low))
            i += 1
    return ranges
