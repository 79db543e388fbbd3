"""Tool calls and thoughts of a masked model, through vLLM's own parsers over HTTP.

The shipped SDAR was trained on neither: a grammar writes its calls, and its thoughts are pinned. Its
tokenizer gets the two tokens of Qwen's thoughts in the place of two that nobody uses.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.end_to_end.test_tools import RECORD, ask
from tests.support.server import MODEL, Server, start_server, stop_server
from vllm_diffusion.cli.checkpoint import shipped_checkpoint

pytestmark = pytest.mark.engine

BLOCK, FILL = 8, 4
THINK, END_OF_THOUGHT = 282, 283
TOOL = {"name": "store", "description": "Store it.", "parameters": RECORD, "strict": True}


@pytest.fixture(scope="module")
def masked_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("masked")
    checkpoint = folder / "sdar"
    shutil.copytree(shipped_checkpoint("sdar"), checkpoint)
    say_thoughts(checkpoint)
    options = ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")
    running = start_server(
        checkpoint, folder / "server.log", *options, "--reasoning-parser", "qwen3"
    )
    yield running
    stop_server(running)


def say_thoughts(checkpoint: Path) -> None:
    """Name the tokens, and have the template end a thought that is not wanted, as Qwen's does."""
    tokenizer = checkpoint / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    for token in content["added_tokens"]:
        name = {THINK: "<think>", END_OF_THOUGHT: "</think>"}.get(token["id"])
        if name is not None:
            content["model"]["vocab"].pop(token["content"], None)
            content["model"]["vocab"][name] = token["id"]
            token |= {"content": name, "special": False}
    tokenizer.write_text(json.dumps(content))
    template = checkpoint / "chat_template.jinja"
    no_thought = (
        "{%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    template.write_text(template.read_text().rstrip("\n") + no_thought)


def request_of(server: Server, **fields: Any) -> dict[str, Any]:
    """A chat whose prompt ends where a block does."""
    for padding in range(BLOCK):
        messages = [{"role": "user", "content": "Make a JSON record: name bob" + "." * padding}]
        body = {"messages": messages, "tools": fields.get("tools")}
        if server.post("/tokenize", body).json()["count"] % BLOCK == 0:
            break
    return {"model": MODEL, "messages": messages, "max_tokens": 160, "seed": 1, **fields}


def pinned(tokens: list[int]) -> dict[str, Any]:
    """A first canvas that begins with these tokens."""
    canvas = tokens + [FILL] * (BLOCK - len(tokens))
    return {"diffusion_seed_canvas": canvas, "diffusion_pinned": list(range(len(tokens)))}


@pytest.mark.parametrize("named", [False, True], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tool_choice(named: bool, stream: bool, masked_server: Server) -> None:
    """A call whose arguments satisfy the tool's schema."""
    named_tool = {"type": "function", "function": {"name": "store"}}
    request = request_of(
        masked_server,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice=named_tool if named else "required",
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    _, ((name, arguments),) = ask(masked_server, request, stream)
    assert name == "store"
    jsonschema.validate(json.loads(arguments), RECORD)


def test_a_thought_is_told_from_the_answer(masked_server: Server) -> None:
    """What stands between the two tokens is the thought, and what is behind them the answer."""
    client = masked_server.client()
    tokens = masked_server.post("/tokenize", {"prompt": "ab", "add_special_tokens": False}).json()
    thought = tokens["tokens"]
    request = request_of(
        masked_server,
        max_tokens=BLOCK,
        extra_body={
            "vllm_xargs": pinned([THINK, *thought, END_OF_THOUGHT, *thought]),
            "ignore_eos": True,
        },
    )
    (choice,) = client.chat.completions.create(**request).choices
    assert choice.message.model_dump()["reasoning"] == "ab"
    assert choice.message.content.startswith("ab")
    assert "think>" not in choice.message.content


def test_a_call_behind_a_thought(masked_server: Server) -> None:
    """The grammar begins where the thought ends, within a canvas."""
    request = request_of(
        masked_server,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice="required",
        extra_body={"vllm_xargs": pinned([THINK, 40, 41, END_OF_THOUGHT])},
    )
    (choice,) = masked_server.client().chat.completions.create(**request).choices
    assert choice.message.model_dump()["reasoning"]
    assert choice.message.tool_calls, choice
    (call,) = choice.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), RECORD)
