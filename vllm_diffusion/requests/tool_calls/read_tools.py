"""Schemas of a request's tools, read once: in a thread, while the event loop serves others, where
somebody waits.

vLLM asks a tool parser for the constraint of a request on the event loop, and again for every
answer that it reads.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_diffusion.requests import bounds
from vllm_diffusion.requests.json_schema import SchemaError, json_text
from vllm_diffusion.requests.readers import Reading, read_aside
from vllm_diffusion.requests.tool_calls.schema_reader import (
    ANYTHING,
    Members,
    ToolSchemaError,
    read_arguments,
)

# Tools of the last requests that are kept: an agent sends the same ones at each turn.
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
        tools: Tools as vLLM's protocol read them; a response may have tools that are not functions.
    """
    return _read(_functions(tools)) if tools else {}


async def read_tools_aside(tools: list[Any] | None) -> None:
    """Read the tools of a request in a thread, so that :func:`read_tools` has them at hand."""
    if tools:
        await read_aside(read_tools, tools)


class _Function(NamedTuple):
    """What is read of a tool: its schema is JSON, or ``None`` with what is wrong with it."""

    name: str
    is_strict: bool
    parameters: str | None
    problem: str | None = None


def _functions(tools: list[Any]) -> tuple[_Function, ...]:
    functions = [function_of(tool) for tool in tools if hasattr(function_of(tool), "parameters")]
    written = tuple(map(_written, functions))
    length = sum(len(function.parameters or "") for function in written)
    if length <= bounds.MOST_CONSTRAINT:
        return written
    problem = f"all schemas together may have {bounds.MOST_CONSTRAINT} characters; got {length}"
    return tuple(function._replace(parameters=None, problem=problem) for function in written)


def _written(function: Any) -> _Function:
    is_strict = getattr(function, "strict", None) is True
    try:
        return _Function(function.name, is_strict, json_text(function.parameters))
    except SchemaError as error:
        return _Function(function.name, is_strict, None, f"parameters: {error}")


@functools.lru_cache(maxsize=_MOST_REMEMBERED)
def _read(functions: tuple[_Function, ...]) -> Mapping[str, ReadTool]:
    with Reading():
        return {function.name: _read_one(function) for function in functions}


def _read_one(function: _Function) -> ReadTool:
    try:
        if function.problem is not None:
            raise ToolSchemaError(function.problem)
        parameters = json.loads(function.parameters or "null")
        return ReadTool(read_arguments(parameters, strict=function.is_strict))
    except ToolSchemaError as error:
        return ReadTool(ANY_TOOL.arguments, str(error) if function.is_strict else None)
