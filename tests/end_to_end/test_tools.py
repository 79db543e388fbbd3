"""Tool calls that a request demands, with a parser whose format vLLM can hold a model to.

vLLM's parser of Gemma's own format does not enforce ``required`` and named tools, for any model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.checkpoints import SHIPPED
from tests.support.server import MODEL, Server, start_server, stop_server

pytestmark = pytest.mark.engine

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "enum": ["ada", "bob"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")
    running = start_server(SHIPPED, tmp_path_factory.mktemp("tools") / "server.log", *options)
    yield running
    stop_server(running)


@pytest.mark.parametrize("named", [False, True], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tool_choice(named: bool, stream: bool, tool_server: Server) -> None:
    """A call whose arguments satisfy the tool's schema, though no tool was ever trained on."""
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Make a JSON record: name bob, age 31."}],
        "max_tokens": 192,
        "seed": 1,
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "store",
                    "description": "Store it.",
                    "parameters": RECORD,
                    "strict": True,
                },
            }
        ],
        "tool_choice": (
            {"type": "function", "function": {"name": "store"}} if named else "required"
        ),
    }
    client = tool_server.client()
    if stream:
        name = arguments = ""
        with client.chat.completions.create(**request, stream=True) as chunks:
            for chunk in chunks:
                for call in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
                    name += call.function.name or ""
                    arguments += call.function.arguments or ""
    else:
        (choice,) = client.chat.completions.create(**request).choices
        (call,) = choice.message.tool_calls
        name, arguments = call.function.name, call.function.arguments
    assert name == "store"
    record = json.loads(arguments)
    assert record["name"] in ("ada", "bob")
    assert isinstance(record["age"], int)
