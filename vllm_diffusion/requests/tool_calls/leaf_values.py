"""Numbers within bounds and strings of a pattern, written bare, in llguidance's dialect of Lark."""

import functools
import json
import math
import re
from collections.abc import Mapping
from decimal import ROUND_FLOOR, Context, Decimal
from typing import Any

from vllm_diffusion.requests.readers import compiling_problem

# Python reads no integer beyond 4,300 digits and no number beyond 1e308; both of these are exact as
# doubles.
_MOST_INTEGER = 10**18
_MOST_NUMBER = 10**15
# llguidance reads a bound of more significant digits inexactly.
_DIGITS = 15
# Classes of ECMA's expressions; of its white space what Python's expressions have too, and then the
# rest.
_CLASSES = {
    "d": "0-9",
    "w": "0-9A-Za-z_",
    "s": r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}",
}
_MARK = r"\x{feff}"
_CLASS = re.compile(r"\\[dDwWsS]")
_CONTROLS = {"n": "\\n", "r": "\\r", "t": "\\t", "f": "\\x0c", "v": "\\x0b", "0": "\\x00"}
_PIECE = re.compile(
    r"\\(?P<code>x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[pP]\{\w+\})|\\(?P<escaped>.)|(?P<plain>.)", re.S
)


class UnwritableError(ValueError):
    """A bound or a pattern that no grammar expresses, with the reason."""


def number_rule(is_integer: bool, bounds: Mapping[str, Any]) -> str:
    """Return the body of a rule for numbers.

    Args:
        is_integer: True for integers, false for all numbers.
        bounds: ``minimum``, ``maximum``, ``exclusiveMinimum``, ``exclusiveMaximum`` and
            ``multipleOf`` of a schema.

    Raises:
        UnwritableError: If no grammar expresses them, or no number is left.
    """
    low = max(_inward(bounds, "Minimum", is_integer), -_most(is_integer))
    high = min(_inward(bounds, "Maximum", is_integer), _most(is_integer))
    if low > high:
        raise UnwritableError("allows no number that can be written")
    if "multipleOf" not in bounds:
        return _checked(_range(is_integer, low, high, None))
    # llguidance writes multiples from zero on.
    parts = [("", max(low, 0), high), ('"-" ', max(-high, 0), -low)]
    written, problem = [], ""
    for sign, least, most in parts:
        if least <= most:
            part = _range(is_integer, least, most, bounds["multipleOf"])
            try:
                written.append(sign + _checked(part))
            except UnwritableError as error:
                problem = str(error)
    if not written:
        raise UnwritableError(problem)
    return " | ".join(written)


def string_terminal(
    pattern: str | None, min_length: int, max_length: int | None, forbidden: str
) -> str:
    """Return the expression of a terminal for the strings of a length in which a pattern is found.

    Args:
        pattern: The expression, as JSON Schema has it; ``None`` for any string.
        min_length: Characters.
        max_length: Characters; ``None`` for any number.
        forbidden: Characters that no string may hold. A length or pattern and all but some longer
            texts at once have more states than llguidance makes.

    Raises:
        UnwritableError: If llguidance does not follow the expression, or no string is left.
    """
    most = "" if max_length is None else max_length
    terminal = f"/[^{escaped(forbidden)}]{{{min_length},{most}}}/"
    if pattern is not None:
        terminal += f" & /{_anchored(pattern)}/"
    _checked("T", f"\nT: {terminal}")
    return terminal


@functools.lru_cache(maxsize=4096)
def _checked(rule: str, others: str = "") -> str:
    """Return the body of a rule that llguidance follows and finds a text for, with the lines of
    others.
    """
    if problem := compiling_problem("grammar", f"start: {rule}{others}"):
        raise UnwritableError(f"cannot be followed: {problem}")
    return rule


def escaped(text: str) -> str:
    """Return the expression of a text."""
    return "".join(map(_character, text))


def _character(character: str) -> str:
    if character.isascii() and character.isprintable():
        is_plain = character.isalnum() or character in " <>_"
        return character if is_plain else f"\\{character}"
    return f"\\x{{{ord(character):x}}}"


def _most(is_integer: bool) -> int:
    return _MOST_INTEGER if is_integer else _MOST_NUMBER


def _inward(bounds: Mapping[str, Any], name: str, is_integer: bool) -> Any:
    """Return the bound of one side, rounded to the inner side where llguidance or a double has not
    got it.

    A decimal just within an exclusive bound could be read as the bound, so it is kept at a
    distance.
    """
    sign = -1 if name == "Minimum" else 1
    most = Decimal(_most(is_integer))
    # Both sides are written as a greatest value.
    inclusive, exclusive = (
        min(most, max(-10 * most, sign * Decimal(str(bounds[key])))) if key in bounds else most
        for key in (name.lower(), f"exclusive{name}")
    )
    limit = min(inclusive, exclusive)
    is_open = f"exclusive{name}" in bounds and exclusive <= inclusive
    if is_integer:
        whole = math.ceil(limit) - 1 if is_open else math.floor(limit)
        near = int(float(whole))
        return sign * (near if near <= whole else int(math.nextafter(float(whole), -math.inf)))
    rounded = Context(_DIGITS, ROUND_FLOOR).plus(limit)
    if is_open and rounded == limit:
        step = Decimal(1).scaleb(max(limit.adjusted(), -3) - 12)
        rounded = Context(_DIGITS, ROUND_FLOOR).subtract(limit, step)
    value = sign * rounded
    return int(value) if value == value.to_integral_value() else float(value)


def _range(is_integer: bool, low: Any, high: Any, step: Any) -> str:
    schema = {"type": "integer" if is_integer else "number", "minimum": low, "maximum": high}
    if step is not None:
        schema["multipleOf"] = step
    # Without white space around the number.
    return f"%json {json.dumps({**schema, 'x-guidance': {'whitespace_flexible': False}})}"


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
    anything = "(?s:.*)"
    return f"{'' if begins else anything}(?:{_in_rust(inner)}){'' if ends else anything}"


def _has_open_alternative(text: str) -> bool:
    depth = 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return True
    return False


def _in_rust(pattern: str) -> str:
    """Translate an ECMAScript expression (classes of ASCII) to Rust's (classes of Unicode).

    Raises:
        UnwritableError: If it has an escape or a class that the two read differently.
    """
    written: list[str] = []
    # The beginning of the class that is being read.
    opened = ""
    before = ""
    for match in _PIECE.finditer(pattern):
        code, sign, plain = match.group("code", "escaped", "plain")
        if code is not None:
            text = f"\\x{{{code[1:]}}}" if code[0] in "xu" else f"\\{code}"
        elif sign is not None:
            text = _escape(sign, is_negated=opened == "[^")
        elif opened and plain == "]":
            text, opened = "]", ""
        elif opened:
            if plain == before == "-":
                raise UnwritableError("has two dashes in a class")
            is_first = written[-1] == "["
            if plain == "^" and is_first:
                text, opened = "^", "[^"
            else:
                is_range = before != "class" and not _CLASS.match(pattern, match.end())
                text = plain if plain == "-" and is_range else _character(plain)
        elif plain == "[":
            text = opened = "["
        elif plain == ".":
            text = r"[^\n\r\x{2028}\x{2029}]"
        elif plain in "^$()*+?{}|":
            text = plain
        else:
            text = plain if plain in ",=:!" else _character(plain)
        before = plain or ("class" if _CLASS.match(match[0]) else "")
        written.append(text)
    return "".join(written)


def _escape(sign: str, *, is_negated: bool) -> str:
    """Write an escape; a class stands in brackets, which may be within others.

    Args:
        sign: Its letter or sign.
        is_negated: True within a class that begins with ``^``.
    """
    if _CLASS.match(f"\\{sign}"):
        kind = sign.lower()
        # What the dialects disagree about is on the side of neither.
        mark = _MARK if kind == "s" and sign.isupper() != is_negated else ""
        return f"[{'^' if sign.isupper() else ''}{_CLASSES[kind]}{mark}]"
    if sign in _CONTROLS:
        return _CONTROLS[sign]
    if sign.isalnum():
        raise UnwritableError(f"has the escape \\{sign}, which cannot be followed")
    return _character(sign)
