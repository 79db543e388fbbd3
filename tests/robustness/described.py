"""Bodies of requests, made from the server's own ``/openapi.json``."""

import random
from collections.abc import Callable
from typing import Any

# Two would resize the server.
_LEFT_OUT = ("/scale_elastic_ep", "/is_scaling_elastic_ep")
# Schemas refer to themselves; below this depth there is nothing but a null.
_DEEPEST = 8
_LETTERS = 'ab0 _-.\n\x00é中<|>{}[]"\\'


def request_schemas(openapi: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the schema of the JSON body of every path that accepts POST."""
    schemas = {}
    for path, methods in openapi["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if path not in _LEFT_OUT and "{" not in path and "application/json" in content:
            schemas[path] = content["application/json"]["schema"]
    return schemas


def json_of(
    schema: dict[str, Any],
    openapi: dict[str, Any],
    anything: Callable[[random.Random], Any],
    rng: random.Random,
    depth: int = 0,
) -> Any:
    """Return a value of a schema, with about one part in twenty replaced by anything.

    Args:
        schema: Part of the description.
        openapi: All of it, for references.
        anything: Draws a value to put where it does not belong.
        rng: What everything is drawn from.
        depth: Levels above this one.
    """
    if rng.random() < 0.05:
        return anything(rng)
    if depth > _DEEPEST:
        return None

    def below(part: Any) -> Any:
        return json_of(part if isinstance(part, dict) else {}, openapi, anything, rng, depth + 1)

    if "$ref" in schema:
        target: Any = openapi
        for name in schema["$ref"].removeprefix("#/").split("/"):
            target = target[name]
        return below(target)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return rng.choice(schema["enum"])
    for alternatives in ("anyOf", "oneOf", "allOf"):
        if alternatives in schema:
            return below(rng.choice(schema[alternatives]))
    kind = schema.get("type")
    if kind == "object":
        return _object(schema, below, rng)
    if kind == "array":
        fewest = schema.get("minItems", 0)
        return [below(schema.get("items")) for _ in range(rng.randint(fewest, fewest + 2))]
    if kind == "string":
        return _text(rng, 12)
    if kind == "integer":
        return rng.randint(-2, 300)
    if kind == "number":
        return rng.uniform(-2, 5)
    if kind == "boolean":
        return rng.random() < 0.5
    return None if kind == "null" else anything(rng)


def _text(rng: random.Random, longest: int) -> str:
    return "".join(rng.choices(_LETTERS, k=rng.randint(0, longest)))


def _object(
    schema: dict[str, Any], below: Callable[[Any], Any], rng: random.Random
) -> dict[str, Any]:
    """The required properties, and up to five others."""
    properties = schema.get("properties", {})
    required = [name for name in schema.get("required", ()) if name in properties]
    others = sorted(properties.keys() - set(required))
    chosen = rng.sample(others, min(len(others), rng.randint(0, 5)))
    made = {name: below(properties[name]) for name in (*required, *chosen)}
    if not properties:
        for _ in range(rng.randint(0, 2)):
            made[_text(rng, 8)] = below(schema.get("additionalProperties"))
    return made
