"""JSON schemas, read once: bounded, checked for wrong types, and in the words that llguidance
follows.

What constrains nothing is taken out of a schema, and what has a simpler equal is written as that.
Each step goes over the schema's parts once, so that the work is linear in the schema's size.
"""

import functools
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from vllm_diffusion.requests import bounds
from vllm_diffusion.requests.readers import GIVEN_UP, compiling_problem
from vllm_diffusion.requests.string_formats import FORMATS

# Keywords that limit no value by themselves; any other key that is not below is not a keyword.
NOTES = frozenset(
    ["$schema", "$id", "id", "$anchor", "$defs", "definitions", "$comment", "$vocabulary"]
)
# What llguidance has no grammar for.
UNFOLLOWED = frozenset(
    [
        *("not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"),
        *("uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
        *("unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    ]
)
CONSTRAINING = UNFOLLOWED | {
    *("type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf"),
    *("properties", "patternProperties", "additionalProperties", "required"),
    *("minProperties", "maxProperties"),
    *("items", "prefixItems", "additionalItems", "minItems", "maxItems"),
    *("minLength", "maxLength", "pattern", "format"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_APPLICATORS = frozenset(
    [
        *("$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "not", "if"),
        *("dependentSchemas", "dependencies"),
    ]
)
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_TYPES_OF: dict[type, set[str]] = {
    type(None): {"null"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    str: {"string"},
    list: {"array"},
    dict: {"object"},
}
# Keywords that hold values and no schemas, and those that hold schemas by names.
_DATA = frozenset(["const", "enum", "default", "examples", "example"])
_BY_NAMES = frozenset(["properties", "patternProperties", "$defs", "definitions"])
# The greatest integer that llguidance writes as it is listed: a larger one gets other digits, and
# -2**63 ends the process.
_MOST_LISTED = 2**53
# llguidance has no grammar of a number's bounds from 2**63 on; this one is exact as a double.
_MOST_BOUND = 922 * 10**16
# No answer has as many: an item or property takes a token at least, of which the longest context
# has 262,144, and a token may have some characters.
_MOST_COUNTED = {"Items": 10**6, "Properties": 10**6, "Contains": 10**6, "Length": 10**8}
# The place of llguidance's problem is looked for in schemas of so many parts.
_MOST_SEARCHED = 300
# White space between the parts of an answer: at most one space after a comma or a colon. With more
# an answer need not end.
_ONE_SPACE = " ?"


class SchemaError(ValueError):
    """A schema that is not followed: its place and the reason."""


def guided_schema(schema: Any, white_space: str = _ONE_SPACE) -> str:
    """Return a schema for llguidance.

    Args:
        schema: A schema, or its text.
        white_space: Expression of what may follow a comma or a colon, and matches the empty string.

    Raises:
        SchemaError: If it is too large, malformed, or asks for what llguidance does not follow.
    """
    plain = plain_schema(schema)
    for part in parts_of(plain):
        keyword = next((key for key in part if key in UNFOLLOWED), None) or _large_integer(part)
        if keyword is not None:
            raise SchemaError(f"{_place_of(plain, part)}/{keyword} is not supported")
    separators = {"item_separator": f",{white_space}", "key_separator": f":{white_space}"}
    plain["x-guidance"] = {"whitespace_flexible": False, **separators}
    text = json.dumps(plain)
    if problem := compiling_problem("json", text):
        raise SchemaError(f"{_place_of_problem(plain, problem)}: {problem}")
    return text


def plain_schema(schema: Any) -> dict[str, Any]:
    """Return a schema with fewer keywords; all of its values are valid by ``schema``.

    An object has no properties that its schema does not name, unless the schema says so. This is
    left open where a value must satisfy two schemas at once: each would forbid the other's
    properties.

    Args:
        schema: A schema, or its text.

    Raises:
        SchemaError: If it is too large or malformed.
    """
    root = _copied(schema)
    _check(root)
    parts = parts_of(root)
    for part in reversed(parts):
        _simplify(part)
    parts = parts_of(root)
    for part in parts:
        _tell_apart(part, root)
    if not any(map(_combines, parts)):
        for part in parts:
            _close(part)
    if problem := _unbounded(parts):
        raise SchemaError(problem)
    return root


def json_text(value: Any) -> str:
    """Return a value as JSON.

    Raises:
        SchemaError: If it is nested too deeply, or cannot be written.
    """
    return str(_converted(json.dumps, value))


def _converted(convert: Callable[[Any], Any], value: Any) -> Any:
    """Return what ``json.dumps`` or ``json.loads`` makes of a value."""
    try:
        return convert(value)
    except RecursionError:
        raise SchemaError(
            f"is nested too deeply; up to {bounds.MOST_LEVELS} levels are supported"
        ) from None
    except (ValueError, TypeError) as error:
        raise SchemaError(f"is not JSON: {error}") from None


def _copied(schema: Any) -> dict[str, Any]:
    """Return a schema of the caller's own, once it is known to be no larger than a grammar may be,
    with numbers and flags as the newest draft has them.
    """
    root = _converted(json.loads, schema if isinstance(schema, str) else json_text(schema))
    if root is True:
        return {}
    if not isinstance(root, dict):
        raise SchemaError(f"must be an object; got {reprlib.repr(root)}")
    # With each part the keyword that holds it; none for what has a name instead.
    pending: list[tuple[Any, str]] = [(root, "")]
    count = 0
    while pending:
        part, within = pending.pop()
        if not isinstance(part, (dict, list)):
            continue
        count += 1
        if count > bounds.MOST_PARTS:
            raise SchemaError(
                f"has more than {bounds.MOST_PARTS} objects and lists; leave parts of it out"
            )
        if isinstance(part, list):
            pending += ((item, within) for item in part)
        elif within in _DATA:
            pending += ((value, within) for value in part.values())
        elif within in _BY_NAMES:
            pending += ((value, "") for value in part.values())
        else:
            _write_flags(part)
            _write_counts(part)
            pending += ((value, key) for key, value in part.items())
    return root


def _check(root: dict[str, Any]) -> None:
    """Refuse a schema in which a keyword has a value of another type than it takes.

    Raises:
        SchemaError: With the place of the value.
    """
    import jsonschema

    try:
        error = jsonschema.exceptions.best_match(_keyword_checks().iter_errors(root))
    except RecursionError:
        raise SchemaError("is nested too deeply; write parts of it as definitions") from None
    if error is not None:
        place = "".join(f"/{key}" for key in error.absolute_path)
        reason = error.message.replace(repr(error.instance), reprlib.repr(error.instance))
        if place.endswith("/type"):
            reason = f"must be of {', '.join(sorted(_TYPES))} and integer; got {reprlib.repr(error.instance)}"
        raise SchemaError(f"#{place}: {reason}")


@functools.cache
def _keyword_checks() -> Any:
    """Return a check of the types of keywords: draft 7's, which is quick, with those of the newest
    draft.

    Annotations may have any value.
    """
    import jsonschema

    draft7 = jsonschema.Draft7Validator.META_SCHEMA
    keywords = {
        key: kind for key, kind in draft7["properties"].items() if key in CONSTRAINING | NOTES
    }
    named = {"type": "object", "additionalProperties": {"$ref": "#"}}
    keywords |= dict.fromkeys(("$defs", "dependentSchemas"), named)
    keywords |= dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), {"$ref": "#"})
    keywords |= dict.fromkeys(("minContains", "maxContains"), draft7["properties"]["minItems"])
    keywords |= dict.fromkeys(
        ("$anchor", "$dynamicAnchor", "$dynamicRef", "$recursiveRef"), {"type": "string"}
    )
    keywords["prefixItems"] = draft7["properties"]["allOf"]
    keywords["dependentRequired"] = {
        "type": "object",
        "additionalProperties": draft7["properties"]["required"],
    }
    del keywords["format"]
    return jsonschema.Draft7Validator({**draft7, "$id": "urn:keywords", "properties": keywords})


def _write_flags(part: dict[str, Any]) -> None:
    """Write the bounds of OpenAPI 3.0, which say with true or false whether the bound itself is
    left out.
    """
    for bound in ("minimum", "maximum"):
        name, limit = f"exclusive{bound.capitalize()}", part.get(bound)
        is_number = isinstance(limit, (int, float)) and not isinstance(limit, bool)
        if isinstance(part.get(name), bool):
            leaves_out = part.pop(name)
            if leaves_out and is_number:
                part[name] = part.pop(bound)


def _write_counts(part: dict[str, Any]) -> None:
    """Write counts with a point, such as ``1.0``, as the integers that they are."""
    for key in (f"{side}{kind}" for side in ("min", "max") for kind in _MOST_COUNTED):
        count = part.get(key)
        if isinstance(count, float) and count.is_integer():
            part[key] = int(count)


def parts_of(root: Any) -> list[dict[str, Any]]:
    """Return a schema and all schemas within it, the outer ones first.

    Args:
        root: A schema that is well formed.
    """
    from referencing.jsonschema import DRAFT7, DRAFT202012

    parts, seen, pending = [], set(), [root]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict) and id(part) not in seen:
            seen.add(id(part))
            parts.append(part)
            for draft in (DRAFT202012, DRAFT7):
                pending += draft.subresources_of(part)
    return parts


def _simplify(part: dict[str, Any]) -> None:
    """Write one schema in fewer words; those within it are written already."""
    is_nullable = part.get("nullable") is True
    for key in part.keys() - CONSTRAINING - NOTES:
        del part[key]
    _drop_idle(part)
    _write_bounds(part)
    _write_format(part)
    _write_names(part)
    _write_unevaluated(part)
    if is_nullable:
        # As OpenAPI has it; definitions stay where they are referred to.
        valued = {key: part.pop(key) for key in part.keys() - NOTES}
        part["anyOf"] = [valued, {"type": "null"}]


def _drop_idle(part: dict[str, Any]) -> None:
    """Take out keywords that say nothing with this value or without another one."""
    for key in ("uniqueItems", "minItems", "minLength", "minProperties"):
        # 0 or, of the first, false.
        if key in part and not part[key]:
            del part[key]
    for kind, most in _MOST_COUNTED.items():
        if part.get(f"max{kind}", 0) >= most:
            del part[f"max{kind}"]
    for key, needed in (
        ("then", "if"),
        ("else", "if"),
        ("minContains", "contains"),
        ("maxContains", "contains"),
    ):
        if needed not in part:
            part.pop(key, None)
    if not part.keys() & {"then", "else"}:
        part.pop("if", None)
    if not isinstance(part.get("items"), list):
        part.pop("additionalItems", None)


def _write_bounds(part: dict[str, Any]) -> None:
    """Write bounds of numbers as llguidance reads them exactly, on the inner side."""
    for name, sign in (("Minimum", -1), ("Maximum", 1)):
        for key in (name.lower(), f"exclusive{name}"):
            # The lower side is written as an upper one.
            bound = sign * part.get(key, 0)
            if bound > _MOST_BOUND:
                part[key] = sign * _MOST_BOUND
            elif isinstance(bound, int) and _MOST_LISTED < abs(bound) <= _MOST_BOUND:
                # As fifteen digits, which a double holds.
                step = 10 ** (len(str(abs(bound))) - 15)
                near = bound // step * step
                part[key] = sign * (near if int(float(near)) <= bound else near - step)


def _write_format(part: dict[str, Any]) -> None:
    """Write a known format as a pattern; beside a pattern, which says more, or listed values, or
    unknown it is an annotation.
    """
    known = FORMATS.get(str(part.pop("format", None)))
    if known is not None and listed_values(part) is None:
        part.setdefault("pattern", f"^(?:{known})$")


def _write_names(part: dict[str, Any]) -> None:
    """Write ``propertyNames`` as properties, where the object has no others."""
    names = part.get("propertyNames")
    if names is True or (isinstance(names, Mapping) and not names.keys() - {"type"} - NOTES):
        if names is True or names.get("type", "string") == "string":
            del part["propertyNames"]
        return
    if not isinstance(names, Mapping) or part.keys() & {"properties", "patternProperties"}:
        return
    others = part.get("additionalProperties", True)
    kinds = names.keys() - NOTES - {"type"}
    if kinds == {"pattern"}:
        named = {"patternProperties": {names["pattern"]: others}}
    elif kinds == {"enum"} and all(isinstance(name, str) for name in names["enum"]):
        # One copy for each name.
        if (
            isinstance(others, Mapping)
            and len(names["enum"]) * len(parts_of(others)) > bounds.MOST_PARTS
        ):
            return
        copied = json.dumps(others)
        named = {"properties": {name: json.loads(copied) for name in names["enum"]}}
    else:
        return
    del part["propertyNames"]
    part |= named | {"additionalProperties": False}


def _write_unevaluated(part: dict[str, Any]) -> None:
    """Write ``unevaluated...`` as the keyword that it equals where nothing else evaluates."""
    if part.keys() & _APPLICATORS:
        return
    if "unevaluatedProperties" in part:
        part.setdefault("additionalProperties", part.pop("unevaluatedProperties"))
    if "unevaluatedItems" in part and "contains" not in part:
        part.setdefault("items", part.pop("unevaluatedItems"))


def _tell_apart(part: dict[str, Any], root: dict[str, Any]) -> None:
    """Write ``anyOf`` for ``oneOf`` where no value fits two of the alternatives.

    They list other values, are of other types, or are objects with other values of one required
    property.
    """
    if "anyOf" in part or "oneOf" not in part:
        return
    listed: set[str] = set()
    kinds: set[str] = set()
    of_listed: set[str] = set()
    objects = []
    for alternative in part["oneOf"]:
        schema = _target(alternative, root)
        if (values := listed_values(schema)) is not None:
            texts = {json.dumps(value, sort_keys=True) for value in values}
            own = set[str]().union(*map(json_types, values)) - {"integer"}
            if texts & listed or own & kinds:
                return
            listed |= texts
            of_listed |= own
            continue
        types = schema.get("type", list(_TYPES))
        own = {
            "number" if kind == "integer" else kind
            for kind in ([types] if isinstance(types, str) else types)
        }
        if own == {"object"}:
            objects.append(_tags(schema))
            own = set() if len(objects) > 1 else own
        if own & (kinds | of_listed):
            return
        kinds |= own
    if len(objects) < 2 or _have_own_tags(objects):
        part["anyOf"] = part.pop("oneOf")


def _have_own_tags(objects: list[dict[str, set[str]]]) -> bool:
    """Return true if one tag is of all objects, and has no value in two of them."""
    for name in objects[0]:
        values = [value for tags in objects for value in tags.get(name, ())]
        if all(name in tags for tags in objects) and len(set(values)) == len(values):
            return True
    return False


def _target(schema: Any, root: dict[str, Any]) -> Mapping[str, Any]:
    """Return the definition that a schema refers to, or the schema; empty if neither is one."""
    reference = schema.get("$ref") if isinstance(schema, Mapping) else None
    if isinstance(reference, str):
        parts = reference.split("/")
        holder = root.get(parts[1]) if len(parts) == 3 and parts[0] == "#" else None
        schema = holder.get(parts[2]) if isinstance(holder, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}


def json_types(value: Any) -> set[str]:
    """Return the names that JSON Schema has for the type of a value."""
    return _TYPES_OF[type(value)]


def listed_values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a schema lists; ``None`` if it lists none."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    return listed if isinstance(listed, list) else None


def _tags(schema: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the required properties whose values are listed strings, with these."""
    tags = {}
    required = {*schema.get("required", ())}
    for name, inner in schema.get("properties", {}).items():
        listed = listed_values(inner) if isinstance(inner, Mapping) else None
        if listed and name in required and all(isinstance(value, str) for value in listed):
            tags[name] = {*listed}
    return tags


def _combines(part: dict[str, Any]) -> bool:
    """Return true if a value has to satisfy two schemas at once here."""
    keywords = part.keys() - NOTES
    return bool(keywords & _APPLICATORS) and (len(keywords) > 1 or len(part.get("allOf", ())) > 1)


def _close(part: dict[str, Any]) -> None:
    """Give an object the properties that it names and no others, unless it allows more."""
    named = part.get("properties", {})
    if (
        named
        and not part.keys() & {"additionalProperties", "patternProperties"}
        and {*part.get("required", ())} <= named.keys()
        and part.get("minProperties", 0) <= len(named)
    ):
        part["additionalProperties"] = False


def _unbounded(parts: list[dict[str, Any]]) -> str | None:
    """Return what would make a grammar too large; ``None`` if nothing does."""
    items = sum(
        int(min(part.get(key, 0), 10**18)) for part in parts for key in ("minItems", "maxItems")
    )
    if items > bounds.MOST_ITEMS:
        return (
            f"has minItems and maxItems that add up to {items}; up to {bounds.MOST_ITEMS} are supported: "
            "lower them, or leave maxItems out"
        )
    remainders = 1
    for part in parts:
        # A value may have to be a multiple of several.
        remainders = math.lcm(remainders, _step(part))
        if remainders > bounds.MOST_REMAINDERS:
            return (
                "has a multipleOf that is too large for a grammar, alone or with others: without zeros at the end "
                f"and decimal points their least common multiple may be {bounds.MOST_REMAINDERS}; lower it, or "
                "leave it out"
            )
        optional = len(part.get("properties", ())) - len(part.get("required", ()))
        if optional > bounds.MOST_OPTIONAL:
            return (
                f"has an object with {optional} properties that are not required; up to {bounds.MOST_OPTIONAL} "
                "are supported: list them in required, or leave them out"
            )
    return None


def _step(part: dict[str, Any]) -> int:
    """Return the digits of a schema's step, less the zeros at their end."""
    step = part.get("multipleOf", 1)
    if not math.isfinite(step):
        return 1
    digits = "".join(map(str, Decimal(str(step)).as_tuple().digits))
    return int(digits.rstrip("0") or 1)


def _large_integer(part: Mapping[str, Any]) -> str | None:
    """Return the keyword of a schema that lists an integer with other digits in a double, however
    deep; ``None`` if none does.
    """
    for key in ("const", "enum"):
        pending = [part.get(key)]
        while pending:
            value = pending.pop()
            if isinstance(value, int) and abs(value) > _MOST_LISTED:
                return f"{key}, with an integer beyond {_MOST_LISTED},"
            if isinstance(value, (list, Mapping)):
                pending += value.values() if isinstance(value, Mapping) else value
    return None


def _place_of_problem(plain: dict[str, Any], problem: str) -> str:
    """Return the place of the innermost schema in which llguidance finds a problem."""
    parts = parts_of(plain)
    if len(parts) > _MOST_SEARCHED or problem == GIVEN_UP:
        return "#"
    shared = {key: plain[key] for key in ("$defs", "definitions") if key in plain}
    found = plain
    for part in parts:
        if compiling_problem("json", json.dumps({**shared, **part})) == problem:
            found = part
    return _place_of(plain, found)


def _place_of(root: Any, part: Any) -> str:
    """Return the place of a schema within another, as a reference has it."""
    pending = [("#", root)]
    while pending:
        path, value = pending.pop()
        if value is part:
            return path
        if isinstance(value, (dict, list)):
            for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
                name = str(key).replace("~", "~0").replace("/", "~1")
                pending.append((f"{path}/{name}", inner))
    return "#"
