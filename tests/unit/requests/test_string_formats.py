"""Formats of strings: a value of the JSON Schema Test Suite can be written if it is valid."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.oracles.written import can_be_written
from vllm_diffusion.requests.json_schema import guided_schema, plain_schema
from vllm_diffusion.requests.string_formats import FORMATS
from vllm_diffusion.requests.tool_calls.leaf_values import string_terminal

SUITE = json.loads((Path(__file__).parent / "data" / "format_values.json").read_text())["formats"]
CHECKER = jsonschema.Draft202012Validator.FORMAT_CHECKER
# Valid values that are not written, as expressions, with the reason.
LEFT_OUT: dict[str, tuple[str, str]] = {
    "time": (".*:60.*", "leap seconds: when there is one is no matter of an expression"),
    "date-time": (".*:60.*", "leap seconds, as for time"),
    "email": ('"[^"]*"@.*', "mailboxes in quotes, which hardly any program takes"),
    "idn-email": (
        '"[^"]*"@.*|[\\x85\uffff\U0001d54f]@.*|.*e\u0301.*',
        "quotes; characters that are not letters of a script in the table, or not in NFC",
    ),
    "hostname": ("xn--.*", "punycode, which no expression tells from what only looks like it"),
    "idn-hostname": (
        "xn--.*|.*[\u30fb\u0f0b\u00b7\u0375\u0590-\u09ff].*|\u03c0.{51}[.\u3002\uff0e\uff61]com",
        "punycode; characters whose neighbours decide, scripts from the right; long labels",
    ),
    "iri": (r".*\[V1.*", "addresses of a version to come, which no library reads"),
    "json-pointer": (r'(?s).*[\\"\x00].*', "characters that JSON escapes, which xgrammar does not"),
    "uri-template": (r"\{%41\}", "percent signs in names, which libraries do not read"),
    "regex": (
        r"\(\?<.*|\[\^?\]|\\cA",
        "names, look-behind and empty classes, which Python and Rust do not read alike",
    ),
}


def in_json(schema: Any) -> Callable[[str], bool]:
    """Return a function that tells whether a string can be written by ``response_format``."""
    accepts = can_be_written("json", guided_schema(schema))
    return lambda value: accepts(json.dumps(value, ensure_ascii=False))


def in_call(schema: Any) -> Callable[[str], bool]:
    """Return a function that tells whether a string can be written in a call of Gemma's."""
    terminal = string_terminal(plain_schema(schema)["pattern"], 0, None, "<")
    return can_be_written("grammar", f"start: T\nT: {terminal}")


BACK_ENDS = {"json": in_json, "call": in_call}


def test_every_format_has_values():
    """The suite has values for each format of the table."""
    assert FORMATS.keys() == SUITE.keys()


@pytest.mark.parametrize(("name", "back_end"), itertools.product(FORMATS, BACK_ENDS))
def test_values_of_the_suite(name, back_end):
    """No invalid value of the suite can be written, and all valid ones that are not left out."""
    can_write = BACK_ENDS[back_end]({"type": "string", "format": name})
    assert [value for value in SUITE[name]["invalid"] if can_write(value)] == []
    left_out = re.compile(LEFT_OUT.get(name, ("(?!)", ""))[0])
    lost = [value for value in SUITE[name]["valid"] if not can_write(value)]
    assert lost == [value for value in SUITE[name]["valid"] if left_out.fullmatch(value)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("uri", "https://a.b/wiki/A?x=1#History"),
        ("uri", "http://localhost:11434/v1"),
        ("uri", "https://a.b/x%20y"),
        ("uri", "https://user:pw@a.b/"),
        ("hostname", "api-gateway.internal"),
        ("hostname", "ec2-1-2-3-4.eu-central-1.compute.amazonaws.com"),
        ("date", "2024-02-29"),
        ("email", "christopher_johnson@example.com"),
        ("ipv6", "2001:db8::"),
        ("regex", r"^(\w+)\s*=\s*(?:[a-z]+|\d{2,})$"),
        ("json-pointer", "/a/b c"),
        ("idn-email", "j\u00f6rg@example.com"),
    ],
)
def test_values_that_people_write(name, value):
    """Values of public reports can be written, in JSON and in a call."""
    for kind in ("json", "call"):
        assert BACK_ENDS[kind]({"type": "string", "format": name})(value), kind


# jsonschema's checks refuse zeros within a number of the pointers and lengths of four digits in
# templates; wide ranges of characters take seconds to draw from.
UNCHECKED = {
    *("relative-json-pointer", "uri-template"),
    *("iri", "iri-reference", "idn-email", "json-pointer"),
}


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - UNCHECKED))
def test_drawn_values_have_their_format(name):
    """Drawn values satisfy jsonschema's check of their format, where its library is there."""
    if name not in CHECKER.checkers:
        pytest.skip(f"jsonschema[format] has no check of {name} here")

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.from_regex(f"(?:{FORMATS[name]})", fullmatch=True))
    def check(value: str) -> None:
        assert CHECKER.conforms(value, name)

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_listed_values_stay(name):
    """A listed value can be written whatever the format beside it, which is an annotation."""
    for listed in ({"enum": ["no such value\u00e9"]}, {"const": "no such value\u00e9"}):
        assert in_json({"type": "string", "format": name, **listed})("no such value\u00e9")
