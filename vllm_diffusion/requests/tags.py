"""Structural tags, which parsers of tool calls make of a request's tools, as xgrammar follows them.

xgrammar drops keywords of a schema that it does not know, so a table of what it follows decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vllm_diffusion.requests.json_schema import (
    CONSTRAINING,
    SchemaError,
    is_of,
    large_integer,
    listed_values,
    parts_of,
    place_of,
    plain_schema,
)

# What a schema of a type may say besides the type; xgrammar drops the rest.
_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "minItems", "maxItems"),
    "string": ("pattern",),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
}
# What may stand alone, without a type.
_ALONE = ("enum", "const", "$ref", "anyOf")
_POINTER = re.compile(r"#(/[^%]*)?")
_ESCAPED = re.compile(r'"|\\\\')
_ALL_BUT = re.compile(r"\[\^(?:\\.|[^\]\\])*\]")
# The greatest integer that it writes as it is listed.
_MOST_LISTED = 2**63 - 1


def written_tag(text: str) -> str:
    """Return a structural tag whose schemas xgrammar follows, with little white space in their
    values.

    Args:
        text: The tag as JSON, in xgrammar's form or in vLLM's older one, ``structures`` and
            ``triggers``.

    Raises:
        SchemaError: If it is none, or a schema asks for what xgrammar does not follow.
    """
    from xgrammar import Grammar

    try:
        tag = json.loads(text)
        if isinstance(tag, dict) and "structures" in tag:
            tag = _in_new_form(tag)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SchemaError(
            f"structural_tag is malformed ({type(error).__name__}: {error})"
        ) from None
    for holder in _with_schemas(tag):
        is_json = holder.get("style", "json") == "json"
        schema = plain_schema(holder["json_schema"])
        for part in parts_of(schema):
            if is_json:
                _write_lengths(part)
                _write_listed(part)
            keyword = _unfollowed(part) or large_integer(part, _MOST_LISTED)
            if is_json and _ESCAPED.search(_ALL_BUT.sub("", part.get("pattern", ""))):
                # xgrammar writes them as they are, which ends or breaks the string of JSON.
                keyword = "pattern, or format, with a quote or a backslash"
            if keyword is not None:
                raise SchemaError(
                    f"{place_of(schema, part)}/{keyword} is not supported in a tool call of this parser"
                )
        holder["json_schema"] = schema
        if is_json:
            # Without a limit an answer need not end.
            holder["max_whitespace_cnt"] = 1
    written = json.dumps(tag)
    try:
        Grammar.from_structural_tag(written)
    except Exception as error:
        # xgrammar has exceptions of several modules.
        raise SchemaError(f"is no structural tag that can be followed: {error}") from None
    return written


def _in_new_form(tag: dict[str, Any]) -> dict[str, Any]:
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure["schema"]},
            "end": structure["end"],
        }
        for structure in tag["structures"]
    ]
    triggered = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    return {"type": "structural_tag", "format": triggered}


def _with_schemas(tag: Any) -> Iterator[dict[str, Any]]:
    """Yield the formats of a tag that hold a schema."""
    pending = [tag]
    while pending:
        part = pending.pop()
        if isinstance(part, dict) and "json_schema" in part:
            yield part
        elif isinstance(part, (dict, list)):
            pending += part.values() if isinstance(part, dict) else part


def _write_lengths(part: dict[str, Any]) -> None:
    """Write lengths as a pattern: xgrammar's strings of a length hold control characters."""
    if part.get("type") == "string" and "pattern" not in part:
        low, high = part.pop("minLength", None), part.pop("maxLength", None)
        if low is not None or high is not None:
            most = "" if high is None else high
            part["pattern"] = f"^[\\s\\S]{{{low or 0},{most}}}$"


def _write_listed(part: dict[str, Any]) -> None:
    """Keep the listed values that are of the schema's ``type``, which xgrammar does not compare."""
    listed, types = listed_values(part), part.get("type")
    if listed is None or types is None:
        return
    kinds = [types] if isinstance(types, str) else types
    if fitting := [value for value in listed if any(is_of(value, kind) for kind in kinds)]:
        for key in ("type", "const"):
            part.pop(key, None)
        part["enum"] = fitting


def _unfollowed(part: Mapping[str, Any]) -> str | None:
    """Return a keyword of a schema that is not in the table."""
    keywords = [key for key in part if key in CONSTRAINING]
    if "$ref" in part and (
        named := next((key for key in ("$anchor", "$id", "id") if key in part), None)
    ):
        return named
    for key in _ALONE:
        if key in keywords:
            others = [other for other in keywords if other != key]
            is_place = key != "$ref" or _POINTER.fullmatch(part["$ref"])
            return next(iter(others), None if is_place else key)
    types = part.get("type", ())
    types = [types] if isinstance(types, str) else types
    followed = {"type", *(key for name in types for key in _OF_TYPE.get(name, ()))}
    if unfollowed := [key for key in keywords if key not in followed]:
        return unfollowed[0]
    return "required" if not {*part.get("required", ())} <= {*part.get("properties", ())} else None
