"""JSON schemas in the words that the back ends of constraints follow.

What constrains nothing is taken out of a schema, and what has a simpler equal is written as that, so
that a back end sees few keywords. :mod:`vllm_diffusion.requests.back_ends` defines which it follows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm_diffusion.requests.string_formats import FORMATS, length_bounds

# Keywords that hold one schema, a list of them, and schemas by name.
_ONE = [
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "items",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "not",
    "if",
    "then",
    "else",
]
_LIST = ["allOf", "anyOf", "oneOf", "prefixItems", "items"]
_NAMED = [
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "dependentSchemas",
    "dependencies",
]
# Keywords that limit no value by themselves; any other key that is not below is no keyword.
NOTES = frozenset(
    ["$schema", "$id", "id", "$anchor", "$defs", "definitions", "$comment", "$vocabulary"]
)
CONSTRAINING = frozenset(
    [
        "type",
        "enum",
        "const",
        "$ref",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "then",
        "else",
        "properties",
        "patternProperties",
        "additionalProperties",
        "propertyNames",
        "required",
        "minProperties",
        "maxProperties",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "items",
        "prefixItems",
        "additionalItems",
        "unevaluatedItems",
        "contains",
        "minContains",
        "maxContains",
        "minItems",
        "maxItems",
        "uniqueItems",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
    ]
)
_APPLICATORS = frozenset(
    [
        "$ref",
        "$dynamicRef",
        "$recursiveRef",
        "allOf",
        "anyOf",
        "oneOf",
        "not",
        "if",
        "dependentSchemas",
        "dependencies",
    ]
)


def subschemas(schema: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the schemas that a schema's keywords hold, each with the keys that lead to it."""
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            for name, inner in value.items():
                if not isinstance(inner, list):
                    yield (key, str(name)), inner
        elif key in _LIST and isinstance(value, list):
            for i, inner in enumerate(value):
                yield (key, str(i)), inner
        elif key in _ONE:
            yield (key,), value


def simplified(schema: Any) -> Any:
    """Return a schema in fewer words whose values are all valid by ``schema``.

    Objects that do not say whether they have other properties than they name have none. Where a
    value must satisfy two schemas at once that would leave nothing, so there it is left open.

    Args:
        schema: Schema of a request, already bounded in depth.
    """
    plain = _plain({} if schema is True else schema)
    plain = _exclusive(plain, plain)
    return plain if _combines(plain) else _closed(plain)


def _plain(schema: Any) -> Any:
    """Copy a schema without what constrains nothing."""
    if not isinstance(schema, Mapping):
        return schema
    keywords = {key: value for key, value in schema.items() if key in CONSTRAINING | NOTES}
    for path, inner in subschemas(keywords):
        plain = _plain(inner)
        if len(path) == 1:
            keywords[path[0]] = plain
        elif isinstance(keywords[path[0]], list):
            keywords[path[0]] = [
                plain if str(i) == path[1] else other for i, other in enumerate(keywords[path[0]])
            ]
        else:
            keywords[path[0]] = {**keywords[path[0]], path[1]: plain}
    _drop_idle(keywords)
    _write_format(keywords)
    _drop_implied_lengths(keywords)
    _write_names(keywords)
    _write_unevaluated(keywords)
    _write_listed(keywords)
    return _nullable(keywords) if schema.get("nullable") is True else keywords


def _drop_idle(keywords: dict[str, Any]) -> None:
    """Take out keywords that say nothing with this value or without another one."""
    for key, value in (
        ("uniqueItems", False),
        ("minItems", 0),
        ("minLength", 0),
        ("minProperties", 0),
    ):
        if keywords.get(key) == value:
            del keywords[key]
    for key, needed in (
        ("then", "if"),
        ("else", "if"),
        ("minContains", "contains"),
        ("maxContains", "contains"),
    ):
        if needed not in keywords:
            keywords.pop(key, None)
    if not keywords.keys() & {"then", "else"}:
        keywords.pop("if", None)
    if not isinstance(keywords.get("items"), list):
        keywords.pop("additionalItems", None)


def _write_format(keywords: dict[str, Any]) -> None:
    """Write a known format as a pattern; one that is unknown is an annotation."""
    known = FORMATS.get(str(keywords.pop("format", None)))
    if known is None:
        return
    pattern = f"^(?:{known})$"
    if "pattern" in keywords:
        keywords["allOf"] = [*keywords.get("allOf", ()), {"pattern": pattern}]
    else:
        keywords["pattern"] = pattern


def _drop_implied_lengths(keywords: dict[str, Any]) -> None:
    """Take out lengths that every string of the pattern has."""
    pattern = keywords.get("pattern")
    lengths = keywords.keys() & {"minLength", "maxLength"}
    if not lengths or not isinstance(pattern, str) or not re.fullmatch(r"\^.*[^\\]\$", pattern):
        return
    if "|" in pattern and not (pattern.startswith("^(?:") and pattern[4:-2] in FORMATS.values()):
        return
    low, high = length_bounds(pattern)
    try:
        if keywords.get("minLength", 0) <= low:
            keywords.pop("minLength", None)
        if high is not None and high <= keywords.get("maxLength", high):
            keywords.pop("maxLength", None)
    except TypeError:
        # A back end reports that it is no number.
        return


def _write_names(keywords: dict[str, Any]) -> None:
    """Write ``propertyNames`` as properties, where the object has no others."""
    names = keywords.get("propertyNames")
    if names is True or (isinstance(names, Mapping) and not {*names} - {"type"} - NOTES):
        if names is True or names.get("type", "string") == "string":
            del keywords["propertyNames"]
        return
    if not isinstance(names, Mapping) or keywords.keys() & {"properties", "patternProperties"}:
        return
    of_names = {*names} - NOTES - {"type"}
    others = keywords.get("additionalProperties", True)
    if of_names == {"pattern"}:
        named = {"patternProperties": {names["pattern"]: others}}
    elif (
        of_names == {"enum"}
        and isinstance(names["enum"], list)
        and all(isinstance(name, str) for name in names["enum"])
    ):
        named = {"properties": dict.fromkeys(names["enum"], others)}
    else:
        return
    del keywords["propertyNames"]
    keywords |= named | {"additionalProperties": False}


def _write_unevaluated(keywords: dict[str, Any]) -> None:
    """Write ``unevaluated...`` as the keyword that it equals where nothing else evaluates."""
    if keywords.keys() & _APPLICATORS:
        return
    if "unevaluatedProperties" in keywords:
        keywords.setdefault("additionalProperties", keywords.pop("unevaluatedProperties"))
    if "unevaluatedItems" in keywords and "contains" not in keywords:
        keywords.setdefault("items", keywords.pop("unevaluatedItems"))


def _write_listed(keywords: dict[str, Any]) -> None:
    """Keep the listed values that are of the schema's ``type``, and drop the type."""
    if not keywords.keys() & {"enum", "const"} or "type" not in keywords:
        return
    types = keywords["type"] if isinstance(keywords["type"], list) else [keywords["type"]]
    listed = [keywords["const"]] if "const" in keywords else keywords["enum"]
    if not isinstance(listed, list):
        return
    fitting = [value for value in listed if any(_is_of(value, name) for name in types)]
    # A list that leaves nothing stays, so that a back end reports it.
    if fitting and ("const" in keywords or "enum" in keywords):
        del keywords["type"]
        if "const" not in keywords:
            keywords["enum"] = fitting


def _is_of(value: Any, name: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return bool(name == ("null" if value is None else "boolean"))
    if isinstance(value, (int, float)):
        return name == "number" or (name == "integer" and float(value).is_integer())
    kinds: dict[Any, Any] = {"string": str, "array": list, "object": Mapping}
    return isinstance(value, kinds.get(name, ()))


def _nullable(keywords: dict[str, Any]) -> dict[str, Any]:
    """Allow null, as OpenAPI's ``nullable`` does; definitions stay where they are referred to."""
    notes = {key: keywords.pop(key) for key in [*keywords] if key in NOTES}
    return {**notes, "anyOf": [keywords, {"type": "null"}]}


def _exclusive(schema: Any, root: Any) -> Any:
    """Copy a schema with ``anyOf`` for ``oneOf`` where no value fits two of the alternatives."""
    if isinstance(schema, list):
        return [_exclusive(inner, root) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    keywords = _mapped(schema, lambda inner: _exclusive(inner, root))
    alternatives = keywords.get("oneOf")
    if isinstance(alternatives, list) and "anyOf" not in keywords:
        seen = [_target(inner, root) for inner in alternatives]
        if all(_differ(a, b) for i, a in enumerate(seen) for b in seen[:i]):
            keywords["anyOf"] = keywords.pop("oneOf")
    return keywords


def _mapped(schema: Mapping[str, Any], write: Callable[[Any], Any]) -> dict[str, Any]:
    """Copy a schema with what ``write`` makes of each schema, or list of them, that it holds."""
    keywords = dict(schema)
    for key in {*_ONE, *_LIST} & keywords.keys():
        keywords[key] = write(keywords[key])
    for key in {*_NAMED} & keywords.keys():
        if isinstance(keywords[key], Mapping):
            keywords[key] = {name: write(inner) for name, inner in keywords[key].items()}
    return keywords


def _target(schema: Any, root: Any) -> Mapping[str, Any]:
    """Return the definition that a schema refers to, or the schema; empty if neither is one."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if isinstance(reference, str):
        parts = reference.split("/")
        holder = root.get(parts[1]) if len(parts) == 3 and parts[0] == "#" else None
        schema = holder.get(parts[2]) if isinstance(holder, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def _differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return true if no value fits both: they have other types, or another value of a tag."""
    kinds = [_kinds(schema) for schema in (one, other)]
    if not kinds[0] & kinds[1]:
        return True
    if kinds != [{"object"}, {"object"}]:
        return False
    tags = [_tags(schema) for schema in (one, other)]
    return any(not tags[0][name] & tags[1][name] for name in tags[0].keys() & tags[1].keys())


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    """Return the types of a schema's values, with a number for an integer."""
    listed = _listed(schema)
    if listed is not None:
        return {
            kind
            for value in listed
            for kind in ("null", "boolean", "number", "string", "array", "object")
            if _is_of(value, kind)
        }
    types = schema.get("type", ["null", "boolean", "number", "string", "array", "object"])
    types = [types] if isinstance(types, str) else types
    return {"number" if name == "integer" else str(name) for name in types}


def _tags(schema: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the required properties whose values are listed strings, with these."""
    named = schema.get("properties")
    required = schema.get("required")
    tags = {}
    for name, inner in (named if isinstance(named, Mapping) else {}).items():
        listed = _listed(inner) if isinstance(inner, Mapping) else None
        if listed and name in (required or ()) and all(isinstance(v, str) for v in listed):
            tags[name] = {*listed}
    return tags


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; ``None`` if it lists none."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) else None


def _combines(schema: Any) -> bool:
    """Return true if a value has to satisfy two schemas at once somewhere."""
    if not isinstance(schema, Mapping):
        return False
    keywords = schema.keys() - NOTES
    several = len(keywords) > 1 or (
        isinstance(schema.get("allOf"), list) and len(schema["allOf"]) > 1
    )
    return bool(keywords & _APPLICATORS and several) or any(
        _combines(inner) for _, inner in subschemas(schema)
    )


def _closed(schema: Any) -> Any:
    """Copy a schema whose objects have the properties that it names and no others, unless it allows more."""
    if isinstance(schema, list):
        return [_closed(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    keywords = _mapped(schema, _closed)
    named, required = keywords.get("properties"), keywords.get("required", [])
    if (
        isinstance(named, Mapping)
        and isinstance(required, list)
        and not keywords.keys() & {"additionalProperties", "patternProperties"}
        and {*map(str, required)} <= {*named}
        and len(named) > 0
        and keywords.get("minProperties", 0) <= len(named)
    ):
        keywords["additionalProperties"] = False
    return keywords
