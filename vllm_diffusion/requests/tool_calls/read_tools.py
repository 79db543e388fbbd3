"""Schemas of a request's tools, read once: in a thread, while the event loop serves others, where somebody waits.

vLLM asks a tool parser for the constraint of a request on the event loop, and again for every answer that it reads.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_diffusion.requests import bounds
from vllm_diffusion.requests.guidance import reading_threads
from vllm_diffusion.requests.json_schema import SchemaError, json_text
from vllm_diffusion.requests.tool_calls.schema_reader import ToolSchemaError, read_arguments
from vllm_diffusion.requests.tool_calls.value_forms import ANYTHING, Members

# Of the requests of late. An agent sends the same tools at each turn.
_MOST_REMEMBERED = 32


@dataclass(frozen=True)
class ReadTool:
    """One tool of a request.

    Attributes:
        arguments: What it takes; any object where its schema cannot be followed.
        problem: Why the schema of a strict tool cannot be followed; ``None`` if it can.
    """

    arguments: Members
    problem: str | None = None


ANY_TOOL = ReadTool(Members({}, frozenset(), ANYTHING))


def function_of(tool: Any) -> Any:
    """Return name, parameters and strictness of a tool: nested in a chat's, not in a response's."""
    return getattr(tool, "function", tool)


def read_tools(tools: list[Any]) -> Mapping[str, ReadTool]:
    """Return the functions among the tools of a request, by name.

    Args:
        tools: Tools as vLLM's protocol read them; a response may have tools that are no functions.
    """
    return _read(_text(tools)) if tools else {}


async def read_tools_aside(tools: list[Any] | None) -> None:
    """Read the tools of a request in a thread, so that :func:`read_tools` has them at hand."""
    if tools:
        reading = reading_threads().submit(lambda: _read(_text(tools)))
        await asyncio.wrap_future(reading)


def _text(tools: list[Any]) -> str:
    functions = [function_of(tool) for tool in tools if hasattr(function_of(tool), "parameters")]
    written = [_function_text(function) for function in functions]
    length = sum(len(parameters or "") for _, _, parameters, _ in written)
    if length > bounds.MOST_CONSTRAINT:
        problem = f"all schemas together may have {bounds.MOST_CONSTRAINT} characters; got {length}"
        written = [[name, is_strict, None, problem] for name, is_strict, *_ in written]
    return json.dumps(written)


def _function_text(function: Any) -> list[Any]:
    """Return name, strictness, schema and what is wrong with it."""
    is_strict = getattr(function, "strict", None) is True
    try:
        return [function.name, is_strict, json_text(function.parameters), None]
    except SchemaError as error:
        return [function.name, is_strict, None, f"parameters: {error}"]


@functools.lru_cache(maxsize=_MOST_REMEMBERED)
def _read(text: str) -> Mapping[str, ReadTool]:
    return {name: _read_one(*function) for name, *function in json.loads(text)}


def _read_one(is_strict: bool, parameters: str | None, problem: str | None) -> ReadTool:
    try:
        if problem is not None:
            raise ToolSchemaError(problem)
        return ReadTool(read_arguments(json.loads(parameters or "null"), strict=is_strict))
    except ToolSchemaError as error:
        return ReadTool(ANY_TOOL.arguments, str(error) if is_strict else None)
