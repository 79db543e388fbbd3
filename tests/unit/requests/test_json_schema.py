"""A schema is refused, or each answer that llguidance accepts is valid for ``jsonschema``."""

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.oracles.written import byte_matcher, can_be_written
from vllm_diffusion.requests.json_schema import CONSTRAINING, SchemaError, guided_schema
from vllm_diffusion.requests.string_formats import FORMATS

SCALARS = [None, True, False, 0, 1, -1, 2, 3, 7, 100, 1.5, 0.5, "", "a", "b", "ab", "abc", "1"]
RECORDS = [
    {},
    *({name: value} for name in ("a", "b", "x") for value in (*SCALARS, [], {}, {"a": 1}, [1])),
    *({"a": a, "b": b} for a in (1, "a", True) for b in (1, "a", None)),
    {"a": 1, "b": 2, "c": 3},
]
LISTS = [[], *([value] for value in SCALARS), [1, 1], [1, "a"], ["a", 1], [1, 2, 3], [{}], [[1]]]
VALUES = [*SCALARS, *RECORDS, *LISTS]

# One schema or more for each keyword, and what each back end makes of keywords side by side.
PLAIN_OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}}
A, B = {"required": ["a"]}, {"required": ["b"]}
BY_KEYWORD: dict[str, list[Any]] = {
    "type": [{"type": ["integer", "null"]}, {"type": "string", "enum": ["a", 1]}],
    "enum": [{"enum": ["a", 1, None, [1], {"a": 1}]}, {"enum": ["a", "abc"], "minLength": 2}],
    "const": [{"const": {"a": 1}}, {"const": "a", "enum": ["b"]}],
    "$ref": [
        {"$defs": {"x": {"type": "integer"}}, "$ref": "#/$defs/x", "minimum": 3},
        {"$defs": {"x": {"$anchor": "X", "type": "integer"}}, "$ref": "#X"},
        {"$id": "http://a.b/c", "$defs": {"x": {"$id": "q", "type": "integer"}}, "$ref": "q"},
    ],
    "$dynamicRef": [{**PLAIN_OBJECT, "$dynamicAnchor": "n", "items": {"$dynamicRef": "#n"}}],
    "$dynamicAnchor": [{"$dynamicAnchor": "n", "properties": {"a": {"$dynamicRef": "#n"}}}],
    "$recursiveRef": [{"$recursiveAnchor": True, "items": {"$recursiveRef": "#"}}],
    "$recursiveAnchor": [{"$recursiveAnchor": True, "type": "integer"}],
    "allOf": [{"allOf": [{"type": "integer"}, {"minimum": 3}]}, {"allOf": [A, B]}],
    "anyOf": [
        {**PLAIN_OBJECT, "anyOf": [A, B], "additionalProperties": False},
        {"type": "integer", "anyOf": [{"minimum": 2, "maximum": 3}, {"const": 7}]},
    ],
    "oneOf": [
        {"oneOf": [{"type": "string"}, {"const": "a"}]},
        {"oneOf": [{"const": 1}, {"const": 2}]},
    ],
    "not": [{"type": "boolean", "not": {"const": True}}, {"not": {}}],
    "if": [{"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "string"}}],
    "then": [{"then": {"type": "integer"}}],
    "else": [{"else": {"type": "integer"}}],
    "properties": [PLAIN_OBJECT, {"properties": {"a": False}}],
    "patternProperties": [{**PLAIN_OBJECT, "patternProperties": {"^a": {"minimum": 3}}}],
    "additionalProperties": [{**PLAIN_OBJECT, "additionalProperties": {"type": "string"}}],
    "propertyNames": [
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "propertyNames": {"enum": ["a"]}},
        {**PLAIN_OBJECT, "propertyNames": {"pattern": "^a"}},
    ],
    "required": [{**PLAIN_OBJECT, "required": ["a", "x"]}, A, {**A, "type": "object"}],
    "minProperties": [{"type": "object", "minProperties": 1}, {**PLAIN_OBJECT, "minProperties": 1}],
    "maxProperties": [{"type": "object", "maxProperties": 1}, {**PLAIN_OBJECT, "maxProperties": 1}],
    "dependentRequired": [{**PLAIN_OBJECT, "dependentRequired": {"a": ["b"]}}],
    "dependentSchemas": [{**PLAIN_OBJECT, "dependentSchemas": {"a": B}}],
    "dependencies": [
        {"$schema": "http://json-schema.org/draft-07/schema#", "dependencies": {"a": ["b"]}}
    ],
    "unevaluatedProperties": [
        {**PLAIN_OBJECT, "unevaluatedProperties": False},
        {"allOf": [PLAIN_OBJECT], "unevaluatedProperties": False},
    ],
    "items": [{"type": "array", "items": {"type": "integer"}}, {"items": False}],
    "prefixItems": [{"type": "array", "prefixItems": [{"type": "integer"}], "maxItems": 1}],
    "additionalItems": [
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": [{"type": "integer"}],
            "additionalItems": False,
        }
    ],
    "unevaluatedItems": [{"prefixItems": [{"type": "integer"}], "unevaluatedItems": False}],
    "contains": [{"type": "array", "contains": {"const": 1}}],
    "minContains": [{"contains": {"const": 1}, "minContains": 2}, {"minContains": 2}],
    "maxContains": [{"contains": {"const": 1}, "maxContains": 1}],
    "minItems": [{"type": "array", "minItems": 2}],
    "maxItems": [{"type": "array", "maxItems": 1}, {"maxItems": 1}],
    "uniqueItems": [{"type": "array", "uniqueItems": True}, {"uniqueItems": False}],
    "minLength": [{"type": "string", "minLength": 2}, {"minLength": 2}],
    "maxLength": [{"type": "string", "maxLength": 2}, {"maxLength": 1, "pattern": "^[ab]+$"}],
    "pattern": [{"type": "string", "pattern": "b"}, {"pattern": "^a|b$"}],
    "format": [{"type": "string", "format": "date"}, {"type": "string", "format": "unknown"}],
    "minimum": [{"type": "integer", "minimum": 2}, {"minimum": 1.5}],
    "maximum": [{"type": "number", "maximum": 2}, {"type": ["number", "null"], "maximum": 1}],
    "exclusiveMinimum": [{"type": "integer", "exclusiveMinimum": 2, "minimum": 1}],
    "exclusiveMaximum": [{"type": "number", "exclusiveMaximum": 2}],
    "multipleOf": [{"type": "integer", "multipleOf": 2}, {"multipleOf": 0.5}],
}
CASES = [(keyword, i) for keyword, schemas in BY_KEYWORD.items() for i in range(len(schemas))]


def is_valid(schema: Any) -> Callable[[Any], bool]:
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    # jsonschema's checks refuse zeros within a pointer's number, and a template's {a:1000}.
    formats = jsonschema.FormatChecker(())
    formats.checkers = {
        name: check
        for name, check in validator.FORMAT_CHECKER.checkers.items()
        if name not in ("relative-json-pointer", "uri-template")
    }
    return validator(schema, format_checker=formats).is_valid  # type: ignore[no-any-return]


def accepts_of(schema: Any) -> Callable[[str], bool]:
    """Return a function that tells whether an answer is accepted, for a schema that is followed."""
    return can_be_written("json", guided_schema(schema))


def refusal_of(schema: Any) -> str | None:
    """Return why a schema is refused, or ``None`` if it is followed."""
    try:
        guided_schema(schema)
    except SchemaError as error:
        return str(error)
    return None


def test_every_keyword_has_a_case():
    """Every keyword of JSON Schema that constrains a value, also of older drafts, has a case."""
    assert BY_KEYWORD.keys() == CONSTRAINING


@pytest.mark.parametrize(("keyword", "i"), CASES)
def test_keyword_is_followed_or_refused(keyword, i):
    """The grammar accepts valid values only, and a refusal names a keyword and its path."""
    schema = BY_KEYWORD[keyword][i]
    if refusal := refusal_of(schema):
        assert refusal.startswith("#")
        return
    accepts, valid = accepts_of(schema), is_valid(schema)
    wrong = [value for value in VALUES if not valid(value) and accepts(json.dumps(value))]
    assert not wrong


COMMON = (
    "type", "enum", "const", "allOf", "anyOf", "properties", "additionalProperties", "required",
    "minProperties", "items", "prefixItems", "minItems", "maxItems", "minLength", "maxLength",
    "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
    "format",
)  # fmt: skip


def test_guidance_follows_the_common_keywords():
    """Common keywords are not refused, and their valid values are accepted."""
    for keyword in COMMON:
        schema = BY_KEYWORD[keyword][0]
        assert refusal_of(schema) is None, keyword
        accepts, valid = accepts_of(schema), is_valid(schema)
        # Objects get no more properties than they name.
        values = [value for value in VALUES if valid(value) and value not in RECORDS]
        assert all(accepts(json.dumps(value)) for value in values), keyword


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"b": {"not": {"const": 1}}}}, "#/properties/b/not"),
        (
            {"items": {"anyOf": [{}, {"dependentRequired": {}}]}},
            "#/items/anyOf/1/dependentRequired",
        ),
        ({"properties": {"a/b": {"oneOf": [{}, {}]}}}, "#/properties/a~1b: oneOf"),
        ({"properties": {"not": {"contains": {}}}}, "#/properties/not/contains"),
    ],
)
def test_place_of_a_refusal(schema, place):
    """The reason begins with the place of the innermost schema that is not followed."""
    assert str(refusal_of(schema)).startswith(place)


LARGE = [sign * (2**bits + more) for sign in (-1, 1) for bits in (53, 63) for more in (-1, 0, 1)]


@pytest.mark.parametrize("value", [*LARGE, 2**64 - 1], ids=str)
@pytest.mark.parametrize("kind", ["const", "enum", "in an array"])
def test_large_integers_that_are_listed(kind, value):
    """An integer beyond 2**53 is refused, since llguidance writes other digits."""
    schema = {"enum": {"type": "integer", "enum": [value]}, "const": {"const": value}}.get(
        kind, {"const": [{"a": value}]}
    )
    if abs(value) > 2**53:
        assert f"an integer beyond {2**53}" in str(refusal_of(schema))
    else:
        listed = schema.get("const", value)
        assert accepts_of(schema)(json.dumps(listed, separators=(",", ":")))


MOST_BOUND = 922 * 10**16


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("most", [2**63 - 1, 2**63, 3.4028235e38, 1.7976931348623157e308], ids=str)
def test_bounds_of_64_bits_and_of_floats(kind, most):
    """A bound beyond llguidance's own is held at the greatest that it has, inclusive or not."""
    for low, high in (("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum")):
        accepts = accepts_of({"type": kind, low: -most, high: most})
        assert all(accepts(text) for text in ("0", str(MOST_BOUND - 1), str(1 - MOST_BOUND)))
        assert not any(accepts(f"{sign}{MOST_BOUND + 1}") for sign in ("", "-"))


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("bound", [2**53 + 1, 2**53 + 3, 2**60 + 65, 2**62 + 769], ids=str)
def test_bounds_that_are_no_doubles(kind, bound):
    """No number beyond a bound is accepted, though llguidance reads it as the nearest double."""
    for key, sign in (("maximum", 1), ("minimum", -1)):
        accepts = accepts_of({"type": kind, key: sign * bound})
        assert not any(accepts(str(sign * (bound + more))) for more in range(1, 1000))
        assert accepts(str(sign * (bound - 20_000)))


@pytest.mark.parametrize(
    ("schema", "count"),
    [
        ({"type": "array", "items": {"type": "boolean"}, "maxItems": 10**6}, "[true]"),
        ({"type": "string", "maxLength": 10**20}, '"ab"'),
        ({"type": "object", "maxProperties": 10**20}, '{"a":1}'),
    ],
    ids=lambda value: str(value)[:40],
)
def test_counts_that_no_answer_reaches(schema, count):
    """A count that no answer reaches limits nothing; one that an answer may reach is refused."""
    assert accepts_of(schema)(count)
    assert "up to 10000 are supported" in str(refusal_of({"type": "array", "maxItems": 10**5}))


def test_whole_numbers_with_a_point():
    """A count with a point, as Jackson and PHP write it, is an integer."""
    accepts = accepts_of({"type": "string", "minLength": 1.0, "maxLength": 3.0})
    assert [accepts(f'"{"a" * n}"') for n in range(5)] == [False, True, True, True, False]
    assert "#/minLength" in str(refusal_of({"type": "string", "minLength": 1.5}))


@pytest.mark.parametrize("name", ["a", "default", "example", "enum", "properties", "minItems"])
def test_properties_with_names_of_keywords(name):
    """What older drafts write with flags and points is read in a property of any name."""
    bounded = {"type": "array", "minItems": 1.0}
    bounded["items"] = {"type": "integer", "minimum": 3, "exclusiveMinimum": True}
    accepts = accepts_of({"type": "object", "properties": {name: bounded}})
    for values, is_accepted in (([4], True), ([3], False), ([], False)):
        assert accepts(json.dumps({name: values})) == is_accepted


@pytest.mark.parametrize(
    ("beside", "accepts_null"),
    [
        *(
            ({key: {"not": {}}}, False)
            for key in ("discriminator", "x-order", "markdownDescription", "title", "example")
        ),
        ({"nullable": True}, True),
    ],
)
def test_keys_beside_a_reference(beside, accepts_null):
    """A key that is not a keyword constrains nothing, and ``nullable`` adds null alone."""
    accepts = accepts_of({"$defs": {"E": {"enum": ["a"]}}, "$ref": "#/$defs/E", **beside})
    assert [accepts(text) for text in ('"a"', '"b"', "null")] == [True, False, accepts_null]


def test_alternatives_with_a_tag():
    """Alternatives with a tag, as pydantic writes discriminated unions, are followed."""
    schema = {
        "$defs": {
            name: {
                "type": "object",
                "properties": {"t": {"const": name, "type": "string"}, "n": {"type": "integer"}},
                "required": ["t"],
            }
            for name in ("cat", "dog")
        },
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}, {"type": "string"}],
    }
    accepts = accepts_of(schema)
    assert accepts('{"t": "cat", "n": 1}')
    assert not accepts('{"t": "cow"}')


def answer(text: str, seed: int, most: int = 200) -> str | None:
    """Return a random text that llguidance accepts, or ``None`` if it does not end soon."""
    import llguidance.numpy

    rng = random.Random(seed)
    machine = byte_matcher("json", text)
    bits = llguidance.numpy.allocate_token_bitmask(1, 257)
    tokens: list[int] = []
    while len(tokens) < most:
        if machine.is_accepting() and (machine.is_stopped() or rng.random() < 0.5):
            return bytes(tokens).decode(errors="replace")
        llguidance.numpy.fill_next_token_bitmask(machine, bits)
        allowed = np.flatnonzero(np.unpackbits(bits[0].view(np.uint8), bitorder="little")[:256])
        closing = [token for token in allowed if token in b'"]},:']
        if not len(allowed):
            return None
        tokens.append(int(rng.choice(closing if closing and rng.random() < 0.4 else list(allowed))))
        machine.consume_token(tokens[-1])
    return None


def some_of(kind: Any = None, **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return schemas of a kind with some of these keywords."""
    return st.fixed_dictionaries({} if kind is None else {"type": kind}, optional=keywords)


INTEGERS = st.integers(-9, 20)
LEAVES = st.one_of(
    st.sampled_from(
        [schema for schemas in BY_KEYWORD.values() for schema in schemas if "$" not in str(schema)]
    ),
    some_of(
        st.sampled_from(["integer", "number", ["integer", "null"]]),
        minimum=INTEGERS,
        exclusiveMaximum=INTEGERS,
        multipleOf=st.integers(1, 5),
    ),
    st.sampled_from([*FORMATS]).map(lambda name: {"type": "string", "format": name}),
    some_of(pattern=st.sampled_from(["^[ab]+$", "x", "^a|b$"]), maxLength=st.integers(0, 4)),
    st.booleans(),
)


def schemas_around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=2)
    names, required = st.sampled_from(["a", "b", "not"]), st.sampled_from(["a", "b", "z"])
    of_objects = some_of(
        st.just("object"),
        properties=st.dictionaries(names, inner, max_size=3),
        required=st.lists(required, max_size=2, unique=True),
        additionalProperties=inner,
        minProperties=st.integers(0, 2),
        anyOf=some,
        **{"x-note": st.just({"not": {}})},
    )
    of_lists = some_of(
        type=st.just("array"),
        items=inner,
        prefixItems=some,
        minItems=st.integers(0, 2),
        maxItems=st.integers(2, 3),
    )
    return st.one_of(of_objects, of_lists, some_of(allOf=some, anyOf=some, oneOf=some))


DRAWN = st.recursive(LEAVES, schemas_around, max_leaves=5)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(DRAWN, st.integers(0, 99))
def test_drawn_schema(schema, seed):
    """An answer that has ended is valid for the schema that was sent."""
    if refusal_of(schema) is not None:
        return
    text = guided_schema(schema)
    assert guided_schema(text) == text
    answered = answer(text, seed)
    if answered is not None:
        assert is_valid(schema)(json.loads(answered)), answered
