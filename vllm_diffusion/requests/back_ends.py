"""Choice of the back end that follows a constraint's JSON schema; the place of what none follows.

llguidance refuses what it does not follow, and is right about the rest. xgrammar drops what it does
not know, so for it only a table of what it follows counts. It serves plain schemas, since it knows
every end token of a model, and the tags of tool parsers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_diffusion.requests.json_schema import CONSTRAINING, simplified, subschemas

# What llguidance has no grammar for.
_UNKNOWN_TO_GUIDANCE = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "uniqueItems",
        "contains",
        "minContains",
        "maxContains",
        "propertyNames",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
    ]
)
# What a schema of a type may say besides the type for xgrammar, which drops the rest.
_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("pattern",),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "boolean": (),
    "null": (),
}
# What may stand alone, without a type.
_ALONE = ("enum", "const", "$ref", "anyOf")
_POINTER = re.compile(r"#(/[^%]*)?")
# The greatest integer that a back end writes as it is listed. llguidance writes a larger one with other
# digits, and ends the process at -2**63; xgrammar rounds it.
_MOST_LISTED = {"guidance": 2**53, "xgrammar": 2**63 - 1}


def schema_refusal(schema: Any, back_end: str) -> str | None:
    """Return what a back end does not follow in a schema, with its place; ``None`` if it follows all.

    Args:
        schema: Schema that :func:`simplified` returned.
        back_end: ``"guidance"`` or ``"xgrammar"``.
    """
    for path, part in _parts(schema, "#"):
        if not isinstance(part, Mapping):
            continue
        if back_end == "guidance":
            keyword = next((key for key in part if key in _UNKNOWN_TO_GUIDANCE), None)
        else:
            keyword = _unfollowed(part)
        if keyword is None:
            keyword = _unwritten(part, _MOST_LISTED[back_end])
        if keyword is not None:
            return f"{path}/{keyword} is not supported"
    if back_end == "guidance":
        return _guidance_problem(schema)
    return None


def _parts(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield a schema and all within it, the outer ones first."""
    yield path, schema
    if isinstance(schema, Mapping):
        for keys, inner in subschemas(schema):
            place = "/".join(key.replace("~", "~0").replace("/", "~1") for key in keys)
            yield from _parts(inner, f"{path}/{place}")


def _unfollowed(part: Mapping[str, Any]) -> str | None:
    """Return a keyword of a schema that is not in xgrammar's table."""
    keywords = [key for key in part if key in CONSTRAINING]
    named = next(
        (key for key in ("$anchor", "$id", "id") if key in part and "$ref" in str(part)), None
    )
    if named is not None:
        return named
    if not keywords:
        return None
    for key in _ALONE:
        if key in keywords:
            others = [other for other in keywords if other != key]
            is_place = key != "$ref" or _POINTER.fullmatch(str(part["$ref"]))
            return next(iter(others), None if is_place else key)
    types = part.get("type", ())
    types = [types] if isinstance(types, str) else types
    followed = {"type", *(key for name in types for key in _OF_TYPE.get(str(name), ()))}
    if unfollowed := [key for key in keywords if key not in followed]:
        return unfollowed[0]
    needed = {*map(str, part.get("required") or ())}
    if not needed <= {*(part.get("properties") or {})}:
        return "required"
    return None


def _unwritten(part: Mapping[str, Any], most: int) -> str | None:
    """Return the keyword of a schema that lists an integer beyond ``most``, however deep."""
    for key in ("const", "enum"):
        pending = [part.get(key)]
        while pending:
            value = pending.pop()
            if isinstance(value, int) and abs(value) > most:
                return f"{key}, with an integer beyond {most},"
            if isinstance(value, (list, Mapping)):
                pending += value.values() if isinstance(value, Mapping) else value
    return None


def _guidance_problem(schema: Any) -> str | None:
    """Return llguidance's own reason, with the place of the innermost schema that has it."""
    problem = _checked_by_guidance(schema)
    if problem is None:
        return None
    shared = (
        {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        if (isinstance(schema, Mapping))
        else {}
    )
    place = "#"
    for path, part in _parts(schema, "#"):
        if isinstance(part, Mapping) and _checked_by_guidance({**shared, **part}) == problem:
            place = path
    return f"{place}: {problem}"


def _checked_by_guidance(schema: Any) -> str | None:
    from llguidance import LLMatcher

    message = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return message.split("\n")[0].split(" Enable ")[0] if message else None


def follow(constraint: Any, back_end: str) -> str | None:
    """Write a constraint's schemas in the words that its back end follows.

    Args:
        constraint: vLLM's ``StructuredOutputsParams``; its ``json`` and ``structural_tag`` are written anew.
        back_end: Back end of the request.

    Returns:
        What is not followed and where; ``None`` if all is.
    """
    if constraint.json is not None:
        schema = _written_for(simplified(_loaded(constraint.json)), back_end)
        constraint.json = json.dumps(schema)
        return schema_refusal(schema, back_end)
    if constraint.structural_tag is None:
        return None
    tag = _loaded(constraint.structural_tag)
    writer = "guidance" if back_end == "guidance" else "xgrammar"
    for holder, key in _tag_schemas(tag):
        holder[key] = simplified(holder[key])
        if holder.get("style", "json") == "json":
            holder[key] = _written_for(holder[key], writer)
        if problem := schema_refusal(holder[key], writer):
            return f"{problem} in a tool call of this parser"
    constraint.structural_tag = json.dumps(tag)
    return None


def _written_for(schema: Any, back_end: str) -> Any:
    """Write lengths as patterns for xgrammar, whose strings of a length hold control characters."""
    if back_end != "xgrammar":
        return schema
    for _, part in _parts(schema, "#"):
        if isinstance(part, dict) and part.get("type") == "string" and "pattern" not in part:
            low, high = part.pop("minLength", None), part.pop("maxLength", None)
            if low is not None or high is not None:
                most = "" if high is None else high
                part["pattern"] = f"^[\\s\\S]{{{low or 0},{most}}}$"
    return schema


def back_end_for(schema: Any, tokenizer: Any) -> str:
    """Return the back end of a JSON schema where the server leaves the choice."""
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend
    from xgrammar import Grammar

    if not GuidanceBackend.is_tokenizer_supported(tokenizer):
        return "xgrammar"
    plain = simplified(_loaded(schema))
    # Expressions and lengths are followed by both, and exactly by one.
    if any("pattern" in part for _, part in _parts(plain, "#") if isinstance(part, Mapping)):
        return "guidance"
    if schema_refusal(plain, "xgrammar") is not None:
        return "guidance"
    try:
        Grammar.from_json_schema(json.dumps(plain))
    except RuntimeError:
        return "guidance"
    return "xgrammar"


def _loaded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _tag_schemas(tag: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the places of schemas in a structural tag."""
    if isinstance(tag, list):
        for inner in tag:
            yield from _tag_schemas(inner)
    elif isinstance(tag, dict):
        for key, inner in tag.items():
            if key in ("json_schema", "schema"):
                yield tag, key
            else:
                yield from _tag_schemas(inner)
