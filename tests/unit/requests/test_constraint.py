"""A constraint is read once, by one back end, in time linear in its length."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engines.admission import refused
from tests.support.oracles.written import byte_matcher, can_be_written
from vllm_diffusion.requests import bounds, constraint
from vllm_diffusion.requests.constraint import read_constraint
from vllm_diffusion.requests.json_schema import (
    CONSTRAINING,
    NOTES,
    SchemaError,
    guided_schema,
    plain_schema,
)
from vllm_diffusion.requests.threads import LeavableThreads

pytestmark = pytest.mark.engine

CONFIG = SimpleNamespace(disable_any_whitespace=False)
RECORD = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": {"type": "integer"}}},
    "required": ["a", "b"],
}

TAG = json.dumps({"format": {"type": "json_schema", "json_schema": RECORD}})


def read(config: Any = CONFIG, **fields: Any) -> StructuredOutputsParams:
    params = StructuredOutputsParams(**fields)
    read_constraint(params, config)
    return params


def refusal(**fields: Any) -> str:
    with refused("structured_outputs") as raised:
        read(**fields)
    return str(raised.value)


@pytest.mark.parametrize(
    ("fields", "back_end"),
    [
        ({"json": RECORD}, "guidance"),
        ({"json": json.dumps(RECORD)}, "guidance"),
        ({"json_object": True}, "guidance"),
        ({"regex": "[a-z]{2,40}"}, "guidance"),
        ({"choice": ["a", "b"]}, "guidance"),
        ({"grammar": 'start: "a" | "b"'}, "guidance"),
        ({"grammar": 'root ::= "a" | "b"'}, "xgrammar"),
        ({"structural_tag": TAG}, "guidance"),
    ],
    ids=str,
)
def test_back_end(fields: dict[str, Any], back_end: str) -> None:
    """Each kind of constraint has one back end, whatever its content."""
    assert read(**fields)._backend == back_end


@pytest.mark.parametrize(
    ("fields", "config", "allowed", "forbidden"),
    [
        ({}, False, ['{"a":true,"b":[1,2]}', '{"a": true, "b": [1, 2]}'], ['{ "a":true,"b":[]}']),
        ({}, False, [], ['{"a":  true,"b":[]}', '{"a":true,\n"b":[]}', '{"a" :true,"b":[]}']),
        ({}, True, ['{"a":true,"b":[]}'], ['{"a": true,"b":[]}']),
        ({"disable_any_whitespace": True}, False, [], ['{"a": true,"b":[]}']),
        (
            {"whitespace_pattern": "[\n ]?"},
            False,
            ['{"a":\ntrue, "b":[]}'],
            ['{"a":\n true,"b":[]}'],
        ),
        ({"whitespace_pattern": r"\s{0,3}"}, False, ['{"a":   true,"b":[]}'], ['{"a":    true}']),
    ],
    ids=str,
)
def test_white_space(
    fields: dict[str, Any], config: bool, allowed: list[str], forbidden: list[str]
) -> None:
    """White space between parts is bounded, and allowed as the request or the server sets it."""
    params = read(SimpleNamespace(disable_any_whitespace=config), json=RECORD, **fields)
    accepts = can_be_written("json", str(params.json))
    assert all(map(accepts, allowed))
    assert not any(map(accepts, forbidden))


@pytest.mark.parametrize("pattern", [".*", "5?", "[^a]", "(", "\\d", "x"])
def test_white_space_that_is_none(pattern: str) -> None:
    """A pattern that allows more than white space between two parts is refused by name."""
    assert "whitespace_pattern" in refusal(json=RECORD, whitespace_pattern=pattern)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"json": {"type": "string", "pattern": r"^(?=.*\d)[a-z]{4}$"}}, "look-around"),
        ({"json": {"type": "string", "pattern": "(["}}, "unclosed"),
        (
            {"json": {"properties": {"b": {"required": 5}}}},
            "#/properties/b/required: 5 is not of type",
        ),
        ({"json": {"type": 1.5}}, "#/type: must be of array"),
        ({"json": {"type": "integer", "multipleOf": 0}}, "#/multipleOf"),
        ({"json": "{"}, "is not JSON"),
        ({"json": "5"}, "must be an object"),
        ({"json": {"type": "array", "minItems": 10**9}}, "minItems"),
        ({"json": {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}}, "multipleOf"),
        ({"json": {"a": {"b": [0] * 10}, "enum": [[]] * 7000}}, "more than 6000 objects and lists"),
        ({"json": '{"a":' * 3000 + "1" + "}" * 3000}, "nested too deeply"),
        ({"json": {"properties": {f"p{i}": {} for i in range(1001)}}}, "1001 properties"),
        ({"json_object": False}, "json_object must be true"),
        ({"choice": []}, "choice must be a list of at least one string"),
        ({"choice": ["a"] * (bounds.MOST_CHOICES + 1)}, f"{bounds.MOST_CHOICES} entries"),
        ({"regex": "[a-z"}, "unclosed character class"),
        ({"regex": "a" * (bounds.MOST_CONSTRAINT + 1)}, f"{bounds.MOST_CONSTRAINT} characters"),
        ({"grammar": "start: rest"}, "grammar is not supported"),
        ({"grammar": "start: x\nx[max_tokens=5]: /.*/"}, "max_tokens=... or stop=... lexemes"),
        ({"grammar": 'start: x\nx[stop="b"]: /.*/'}, "max_tokens=... or stop=... lexemes"),
        ({"grammar": "root ::= rest"}, "grammar is not supported"),
        ({"grammar": " "}, "grammar must be a non-empty string"),
        ({"structural_tag": "x"}, "structural_tag is malformed"),
        ({"structural_tag": '{"structures": 5, "triggers": []}'}, "structural_tag is malformed"),
        (
            {"structural_tag": '{"structures": [{"begin": 1}], "triggers": []}'},
            "is malformed (KeyError",
        ),
        (
            {
                "structural_tag": '{"format": {"type": "grammar", "grammar": "// llguidance\\na: b"}}'
            },
            "structural_tag is not supported",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_refusals(fields: dict[str, Any], words: str) -> None:
    """A malformed, too large or unsupported constraint is refused with place and reason."""
    said = refusal(**fields)
    assert words in said
    assert len(said) < 600


CHOICES = ["a.b", "(x", "a|b", "\\d", "é", "", " y", "a-b", "[z]", "{2}", 'q"r', "x\ny", "/"]


@pytest.mark.parametrize("choices", [CHOICES, [f"choice {i}" for i in range(bounds.MOST_CHOICES)]])
def test_choices(choices: list[str]) -> None:
    """Each choice is accepted literally, and nothing else, however many there are."""
    accepts = can_be_written("choice", json.dumps(read(choice=choices).choice))
    for text in (*choices[:20], *choices[-20:], "aab", "3", "choice", "z"):
        assert accepts(text) == (text in choices), text


def test_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal parameters are read once, and parameters whose field changed are read again."""
    compiled: list[str] = []
    real = constraint.guided_schema
    monkeypatch.setattr(
        constraint, "guided_schema", lambda text, space: compiled.append(text) or real(text, space)
    )
    schema = {"type": "string", "title": "read once"}
    params = read(json=schema)
    for again in (params, StructuredOutputsParams(json=schema)):
        read_constraint(again, CONFIG)
    assert len(compiled) == 1
    params.json = {"type": "string", "title": "another"}
    read_constraint(params, CONFIG)
    assert len(compiled) == 2


def test_the_event_loop_goes_on() -> None:
    """Other tasks of the event loop run while a large schema is read."""

    async def turns_meanwhile() -> int:
        schema = {"anyOf": [{"const": f"v{i}"} for i in range(4000)]}
        params = StructuredOutputsParams(json=schema)
        reading = asyncio.ensure_future(constraint.read_constraint_aside(params, CONFIG))
        turns = 0
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        await reading
        assert params._backend == "guidance"
        return turns

    assert asyncio.run(turns_meanwhile()) > 10


@pytest.mark.parametrize("link", ["alone", "in a property", "in items"])
def test_longest_chain_of_references(link: str) -> None:
    """The longest accepted chain of references compiles, and another thread can free it."""

    def of(i: int) -> dict[str, Any]:
        inner = {"$ref": f"#/$defs/d{i + 1}"}
        properties = {"type": "object", "properties": {"a": inner}}
        return {"alone": inner, "in a property": properties, "in items": {"items": inner}}[link]

    objects = {"alone": 1, "in a property": 3, "in items": 2}[link]
    n = (bounds.MOST_PARTS - 10) // objects
    definitions = {f"d{i}": of(i) for i in range(n)} | {f"d{n}": {"type": "null"}}
    text = str(read(json={"$defs": definitions, "$ref": "#/$defs/d0"}).json)
    LeavableThreads(1, "test").submit(byte_matcher, "json", text).result()


def lines_run(work: Callable[[], Any]) -> int:
    """Count the lines of this package that run in a call, the same on any machine."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if "vllm_diffusion" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(SchemaError):
            work()
    finally:
        sys.settrace(before)
    return count


def _tagged(i: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"t": {"const": f"v{i}"}}, "required": ["t"]}


GROWING: dict[str, Callable[[int], Any]] = {
    "constants": lambda n: {"anyOf": [{"const": f"v{i}"} for i in range(n)]},
    "tagged objects": lambda n: {"oneOf": [_tagged(i) for i in range(n)]},
    "alternatives that are equal": lambda n: {"oneOf": [{"type": "object"} for _ in range(n)]},
    "listed values": lambda n: {"oneOf": [{"enum": [i]} for i in range(n)]},
    "definitions, one bad": lambda n: {
        "$defs": {f"d{i}": {"type": "integer"} for i in range(n)},
        "properties": {"a": {"type": "string", "pattern": "(?=a)b"}},
    },
    "steps": lambda n: {"anyOf": [{"multipleOf": i + 1} for i in range(n)]},
    "a chain of references": lambda n: {
        "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(n)},
        "$ref": "#/$defs/d0",
    },
    "names of properties": lambda n: {
        "propertyNames": {"enum": [f"n{i}" for i in range(n)]},
        "additionalProperties": {"properties": {f"p{i}": {} for i in range(n)}},
    },
    "values": lambda n: {"enum": [f"v{i}" for i in range(n)]},
    "nullable": lambda n: {
        "properties": {f"p{i}": {"type": "string", "nullable": True} for i in range(n)}
    },
    "formats": lambda n: {"properties": {f"p{i}": {"format": "date"} for i in range(n)}},
    "wrong types": lambda n: {"properties": {f"p{i}": {"type": 5} for i in range(n)}},
}


@pytest.mark.parametrize("kind", GROWING)
def test_time_is_linear(kind: str) -> None:
    """A schema four times as long runs at most five times the lines of this package."""
    few, many = (GROWING[kind](n) for n in (200, 800))
    small, large = lines_run(lambda: guided_schema(few)), lines_run(lambda: guided_schema(many))
    assert large <= 5 * small, (small, large)


ODD = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3),
    st.lists(st.one_of(st.integers(), st.text(max_size=2), st.just({})), max_size=2),
    st.just({}), st.just({"a": 5}), st.just({"type": 5}), st.just({"pattern": ["a"]}),
)  # fmt: skip


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_odd_values_are_refused_or_followed(data: st.DataObject) -> None:
    """Known keywords with values of any type are followed or refused with a reason."""
    names = st.sampled_from(sorted(CONSTRAINING | NOTES | {"nullable", "title"}))
    keywords = st.dictionaries(names, ODD, max_size=4)
    schema = data.draw(
        st.one_of(
            keywords,
            st.dictionaries(
                names, st.one_of(ODD, keywords, st.lists(keywords, max_size=2)), max_size=4
            ),
            keywords.map(lambda inner: {"type": "object", "properties": {"a": inner}}),
        )
    )
    for reads in (guided_schema, plain_schema):
        with contextlib.suppress(SchemaError):
            reads(schema)
