"""Reads the JSON schema of a tool's parameters into the forms that a call may write.

A call in Gemma's format writes ``name{key:value,...}``: keys and numbers as they are, strings
between two marker tokens. A schema is read here into the forms of each JSON type that a value may
have, from which the grammar of a call derives. What that grammar cannot say, or the format cannot
write, is refused for a strict tool, so that a call that follows the grammar always has arguments
that satisfy the schema.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_diffusion.requests.json_schema import (
    CONSTRAINING,
    UNFOLLOWED,
    SchemaError,
    json_types,
    listed_values,
    parts_of,
    plain_schema,
)
from vllm_diffusion.requests.tool_calls.leaf_values import (
    UnwritableError,
    number_rule,
    string_terminal,
)

# Forms that the arguments of a call may have, one or more for each JSON type.


@dataclass(frozen=True)
class Scalar:
    """A value out of a list; any number, boolean or null without one.

    Attributes:
        values: Allowed values; ``None`` for all.
    """

    values: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Text:
    """A string.

    Attributes:
        min_length: Characters.
        max_length: Characters; ``None`` for any number.
        pattern: Expression that is found in it; ``None`` for any string.
    """

    min_length: int = 0
    max_length: int | None = None
    pattern: str | None = None


@dataclass(frozen=True)
class Number:
    """A number within bounds.

    Attributes:
        rule: Body of the grammar's rule.
    """

    rule: str


@dataclass(frozen=True)
class Items:
    """An array."""

    item: Value
    min_items: int = 0
    max_items: int | None = None


@dataclass(frozen=True)
class Members:
    """Object with properties.

    Attributes:
        properties: Types by name, in the order in which Gemma's chat template writes them.
        required: Names of required properties.
        others: Type of properties with any other name; ``None`` if there may be none.
    """

    properties: Mapping[str, Value]
    required: frozenset[str]
    others: Value | None = None


Form = Scalar | Text | Number | Items | Members


@dataclass(frozen=True)
class Value:
    """Type of one value.

    Attributes:
        forms: Allowed forms for each JSON type; empty for a value of any kind.
    """

    forms: Mapping[str, tuple[Form, ...]]


ANYTHING = Value({})


class ToolSchemaError(ValueError):
    """A tool's schema asks for what a call of Gemma's cannot say, or contradicts itself."""


class NoValueError(ToolSchemaError):
    """A schema that no value satisfies."""


# Keywords that the grammar does not follow. A strict tool is refused for them.
_UNFOLLOWED = UNFOLLOWED | {
    *("minProperties", "maxProperties", "patternProperties", "additionalItems"),
}
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# The reader splits keys at the colon and values at the comma, and counts brackets.
_BARE_KEY = re.compile(r"[^\s:,{}\[\]<](?:[^:,{}\[\]<\r\n]*[^\s:,{}\[\]<])?")
# A schema whose references multiply could fill the memory.
_MOST_VALUES = 2048
_MOST_LEVELS = 32


def read_arguments(parameters: Mapping[str, Any] | None, *, strict: bool) -> Members:
    """Read the ``parameters`` of a tool.

    Args:
        parameters: A JSON schema of an object; nothing for a tool that takes nothing.
        strict: Refuse what would not be enforced.

    Raises:
        ToolSchemaError: Naming the place in the schema.
    """
    if not parameters:
        return Members({}, frozenset())
    try:
        root = plain_schema(parameters)
    except SchemaError as error:
        raise ToolSchemaError(f"parameters: {error}") from None
    value = _Reader(root, strict).read(root, "parameters", ())
    (*_, arguments) = value.forms.get("object", (None,))
    if set(value.forms) != {"object"} or not isinstance(arguments, Members):
        raise ToolSchemaError("parameters must describe an object")
    return arguments


class _Reader:
    """A reader of one tool's schema, whose keywords have values of the right types."""

    def __init__(self, root: Mapping[str, Any], strict: bool) -> None:
        self._root = root
        self._schemas = {id(part) for part in parts_of(root)}
        self._strict = strict
        self._num_values = 0

    def read(self, schema: Any, path: str, inside: tuple[str, ...]) -> Value:
        """Read the schema of one value.

        Args:
            schema: Schema of the user.
            path: Its path in the tool's schema, for messages.
            inside: References that led here.
        """
        self._num_values += 1
        if self._num_values > _MOST_VALUES or path.count(".") > _MOST_LEVELS:
            raise ToolSchemaError(
                f"{path[:80]} makes the schema too large (at most {_MOST_VALUES} values, references "
                f"followed, and {_MOST_LEVELS} levels); leave parts of it out"
            )
        if schema is True or schema == {}:
            return ANYTHING
        if not isinstance(schema, Mapping):
            raise NoValueError(f"{path} allows no value")
        if "prefixItems" in schema:
            raise ToolSchemaError(f"{path}.prefixItems is not supported; give items one schema")
        unfollowed = sorted(schema.keys() & _UNFOLLOWED)
        if self._strict and unfollowed:
            raise ToolSchemaError(
                f"{path}.{unfollowed[0]} cannot be enforced; leave it out, or the tool's strict"
            )
        keywords = (schema.keys() & CONSTRAINING) - _UNFOLLOWED
        for name in ("$ref", "allOf", "anyOf", "oneOf"):
            if name not in keywords:
                continue
            if keywords - {name, "type"}:
                others = ", ".join(sorted(keywords - {name}))
                raise ToolSchemaError(
                    f"{path} has {name} together with {others}; write it as one schema"
                )
            return _restricted(self._referred(schema, name, path, inside), schema, path)
        if not keywords:
            return ANYTHING
        return self._plain(schema, path, inside)

    def _referred(
        self, schema: Mapping[str, Any], name: str, path: str, inside: tuple[str, ...]
    ) -> Value:
        """Read a reference or a list of alternatives."""
        if name == "$ref":
            reference = schema["$ref"]
            if reference in inside:
                raise ToolSchemaError(f"{path} refers to itself through {reference}")
            return self.read(self._target(reference, path), path, (*inside, reference))
        alternatives = schema[name]
        if name == "allOf" and len(alternatives) > 1:
            raise ToolSchemaError(f"{path}.allOf is not supported; write it as one schema")
        read = []
        for i, alternative in enumerate(alternatives):
            # One that allows nothing leaves the others.
            with contextlib.suppress(*([NoValueError] if name != "allOf" else [])):
                read.append(self.read(alternative, f"{path}.{name}[{i}]", inside))
        if not read:
            raise NoValueError(f"{path} allows no value")
        return _any_of(read, path, disjoint=name == "oneOf" and self._strict)

    def _target(self, reference: str, path: str) -> Any:
        target: Any = self._root
        if not reference.startswith("#"):
            raise ToolSchemaError(f"{path}.$ref={reference!r} must be a place in this schema")
        for part in reference.removeprefix("#").removeprefix("/").split("/"):
            if part:
                name = part.replace("~1", "/").replace("~0", "~")
                if not isinstance(target, Mapping) or name not in target:
                    raise ToolSchemaError(f"{path}.$ref={reference!r} names nothing")
                target = target[name]
        if not isinstance(target, bool) and id(target) not in self._schemas:
            raise ToolSchemaError(f"{path}.$ref={reference!r} names no schema")
        return target

    def _plain(self, schema: Mapping[str, Any], path: str, inside: tuple[str, ...]) -> Value:
        types = _types(schema)
        if "const" in schema or "enum" in schema:
            return Value(_listed(schema, types, path))
        forms: dict[str, tuple[Form, ...]] = {}
        for name in types or _types_meant(schema):
            if name == "object":
                forms[name] = (self._members(schema, path, inside),)
            elif name == "array":
                item = self.read(schema.get("items", True), f"{path}.items", inside)
                forms[name] = (Items(item, *_bounds(schema, "Items", path)),)
            elif name == "string":
                forms[name] = (_text(schema, path),)
            elif name in ("integer", "number") and schema.keys() & {*_BOUNDS}:
                forms[name] = (_number(schema, name, path),)
            else:
                forms[name] = (Scalar(),)
        return Value(forms)

    def _members(self, schema: Mapping[str, Any], path: str, inside: tuple[str, ...]) -> Members:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        for name in [*properties, *required]:
            _check_key(name, path)
        # Empty properties are how a tool declares that it takes nothing.
        more = schema.get("additionalProperties", "properties" not in schema)
        others = None
        if not properties and more is not False:
            others = self.read(more, f"{path}.additionalProperties", inside)
        named = {**dict.fromkeys(required, True), **properties}
        return Members(
            {
                # As the template sorts the arguments of the calls that it shows the model.
                name: self.read(named[name], f"{path}.{name}", inside)
                for name in sorted(named, key=str.lower)
            },
            frozenset(required),
            others,
        )


def _check_key(name: str, path: str) -> None:
    if not _BARE_KEY.fullmatch(name):
        raise ToolSchemaError(
            f"{path} has the name {name!r}, which Gemma's format cannot write; use letters, digits and underscores"
        )


def _keys(value: Any, path: str, level: int = 0) -> list[str]:
    """Return the names in a listed value, however deep."""
    if level > _MOST_LEVELS:
        raise ToolSchemaError(f"{path} lists a value of more than {_MOST_LEVELS} levels")
    if isinstance(value, list):
        return [key for item in value for key in _keys(item, path, level + 1)]
    if isinstance(value, dict):
        return [*value, *_keys([*value.values()], path, level)]
    return []


def _types(schema: Mapping[str, Any]) -> list[str]:
    types: str | list[str] = schema.get("type", [])
    return [types] if isinstance(types, str) else types


def _types_meant(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that the keywords of a schema without a type imply."""
    if schema.keys() & {"properties", "required", "additionalProperties"}:
        return ["object"]
    if schema.keys() & {"items", "minItems", "maxItems"}:
        return ["array"]
    if schema.keys() & {*_BOUNDS}:
        return ["number"]
    return ["string"]


def _text(schema: Mapping[str, Any], path: str) -> Text:
    low, high = _bounds(schema, "Length", path)
    pattern = schema.get("pattern")
    text = Text(low, high, pattern)
    if text != Text():
        try:
            string_terminal(pattern, low, high, "<")
        except UnwritableError as error:
            name = "pattern" if pattern is not None else "maxLength"
            raise ToolSchemaError(f"{path}.{name} {error}") from None
    return text


def _number(schema: Mapping[str, Any], name: str, path: str) -> Number:
    bounds = {key: schema[key] for key in _BOUNDS if key in schema}
    for key, value in bounds.items():
        if math.isnan(value):
            raise ToolSchemaError(f"{path}.{key} must be a number; got {value!r}")
    try:
        return Number(number_rule(name == "integer", bounds))
    except UnwritableError as error:
        raise ToolSchemaError(f"{path}.{[*bounds][-1]} {error}") from None


def _bounds(schema: Mapping[str, Any], what: str, path: str) -> tuple[int, int | None]:
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if high is not None and high < low:
        raise ToolSchemaError(f"{path}.max{what}={high} is below min{what}={low}")
    return low, high


def _listed(schema: Mapping[str, Any], types: list[str], path: str) -> dict[str, tuple[Form, ...]]:
    """The forms of ``enum`` and ``const``."""
    of_other_forms = {"properties", "items", "minLength", "maxLength", "pattern", *_BOUNDS}
    if unfit := schema.keys() & of_other_forms:
        raise ToolSchemaError(
            f"{path} has {min(unfit)} together with a list of values; leave it out"
        )
    values = listed_values(schema) or []
    if "const" in schema and schema["const"] not in schema.get("enum", values):
        raise ToolSchemaError(f"{path}.enum must have const in it where both are given")
    for key in _keys(values, path):
        _check_key(key, path)
    listed: dict[str, list[Any]] = {}
    for value in values:
        names = json_types(value)
        if fitting := names.intersection(types or names):
            listed.setdefault(min(fitting), []).append(value)
    if not listed:
        raise NoValueError(f"{path} allows no value")
    return {name: (Scalar(tuple(same_type)),) for name, same_type in listed.items()}


def _any_of(values: list[Value], path: str, *, disjoint: bool) -> Value:
    """One value that may be any of ``values``."""
    if any(not value.forms for value in values):
        if disjoint and len(values) > 1:
            raise ToolSchemaError(
                f"{path}.oneOf has an alternative that allows anything beside others; use anyOf"
            )
        return ANYTHING
    merged: dict[str, tuple[Form, ...]] = {}
    for value in values:
        for name, forms in value.forms.items():
            pairs = itertools.product(merged.get(name, ()), forms)
            if disjoint and not all(_are_apart(*pair) for pair in pairs):
                raise ToolSchemaError(
                    f"{path}.oneOf has two alternatives of type {name}, which one value could satisfy; use anyOf"
                )
            merged[name] = merged.get(name, ()) + forms
    if disjoint and {"integer", "number"} <= merged.keys():
        raise ToolSchemaError(f"{path}.oneOf has an integer that is a number too; use anyOf")
    return Value(merged)


def _are_apart(one: Form, other: Form) -> bool:
    """Return true if what is written in one of two forms never satisfies the schema of the
    other.
    """
    return (
        isinstance(one, Members)
        and isinstance(other, Members)
        and _lacks(one, other)
        and _lacks(other, one)
    )


def _lacks(own: Members, other: Members) -> bool:
    """Return true if an object in one form always misses a property that another form requires."""
    if own.others is not None:
        return False
    for name in other.required:
        if name not in own.properties:
            return True
        written, needed = _listed_texts(own.properties[name]), _listed_texts(other.properties[name])
        if written is not None and needed is not None and not written & needed:
            return True
    return False


def _listed_texts(value: Value) -> set[str] | None:
    """Return the strings that a value lists; ``None`` if it may be anything else."""
    forms = value.forms.get("string", ())
    if value.forms.keys() != {"string"} or any(
        not isinstance(form, Scalar) or form.values is None for form in forms
    ):
        return None
    return {text for form in forms if isinstance(form, Scalar) for text in form.values or ()}


def _restricted(value: Value, schema: Mapping[str, Any], path: str) -> Value:
    """Return ``value`` without the forms that are not of the schema's ``type``."""
    types = _types(schema)
    if not types or not value.forms:
        return value
    forms = {name: forms for name, forms in value.forms.items() if name in types}
    if not forms:
        raise NoValueError(f"{path} allows no value")
    return Value(forms)
