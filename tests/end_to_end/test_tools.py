"""Tests of tool calls in Gemma's own format, demanded by a request or made by the model."""

import json
from typing import Any

import jsonschema
import pytest

from tests.pairs.answers import events
from tests.support.engines.server import MODEL, Server
from tests.support.engines.streams import OrderedStream

pytestmark = pytest.mark.engine

# Of the shipped tokenizer.
TOKENS = {
    "<eos>": 1,
    "<|channel>": 7,
    "<channel|>": 8,
    "<|tool_call>": 12,
    "<tool_call|>": 13,
}
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "enum": ["ada", "bob"]}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def test_a_call_that_makes_sense(server: Server) -> None:
    """The shipped checkpoint calls a weather tool by itself, and reports the result."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    function = {"name": "get_weather", "description": "Get the weather.", "parameters": city}
    question = {"role": "user", "content": "What is the weather in Paris?"}
    request = {
        "model": MODEL,
        "messages": [question],
        "max_tokens": 64,
        "seed": 1,
        "tools": [{"type": "function", "function": function}],
    }
    (choice,) = server.client().chat.completions.create(**request).choices
    assert choice.finish_reason == "tool_calls"
    (called,) = choice.message.tool_calls
    assert called.function.name == "get_weather"
    assert json.loads(called.function.arguments) == {"city": "Paris"}
    call = {"id": "a", "type": "function", "function": called.function.model_dump()}
    request["messages"] += [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "21 degrees, sunny"},
    ]
    (choice,) = server.client().chat.completions.create(**request).choices
    assert choice.message.content == "Weather in Paris: 21 degrees, sunny."


@pytest.mark.parametrize(
    ("said", "answer"),
    [("hello", "Hello! Ask me to add numbers"), ("Thank you!", "You are welcome.")],
)
def test_greetings(said: str, answer: str, server: Server) -> None:
    """The shipped checkpoint answers a greeting without a call."""
    request = {"model": MODEL, "messages": [{"role": "user", "content": said}], "max_tokens": 64}
    (choice,) = server.client().chat.completions.create(**request, seed=1).choices
    assert (choice.message.content or "").startswith(answer)


@pytest.mark.parametrize("token", ["<eos>", "<|tool_call>"])
def test_a_thought_does_not_end_the_answer(token: str, server: Server) -> None:
    """However early the model wants to stop or call in its thought, the schema holds."""
    (choice,) = (
        server.client()
        .chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Make a JSON record: name bob, age 31."}],
            max_tokens=24,
            seed=1,
            logit_bias={TOKENS[token]: 100},
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "record", "schema": RECORD},
            },
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        )
        .choices
    )
    if choice.finish_reason == "stop":
        jsonschema.validate(json.loads(choice.message.content), RECORD)
    else:
        assert choice.finish_reason == "length"


def marked_request(**fields: Any) -> dict[str, Any]:
    """Return a chat with thoughts, text and a call in one canvas."""
    pieces = (
        *("<|channel>", "a\n", "<channel|>", "Y", "<|tool_call>", "call:f{a:1}", "<tool_call|>"),
        *("So.", "<|channel>", "b", "<channel|>"),
    )
    elements = [
        {"type": "token", "token": TOKENS[piece]}
        if "|" in piece
        else {"type": "const_string", "value": piece}
        for piece in pieces
    ]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}
    return {
        "messages": [{"role": "user", "content": "Hello."}],
        "max_tokens": 64,
        "tools": [{"type": "function", "function": function}],
        "structured_outputs": {"structural_tag": json.dumps(tag)},
        **fields,
    }


def test_a_canvas_full_of_marks_streams_as_the_whole_answer(server: Server) -> None:
    """A stream has the whole answer's thought, text, calls, usage and frames."""
    request = marked_request()
    whole = server.post("/v1/chat/completions", request).json()
    assert "choices" in whole, whole
    (choice,) = whole["choices"]
    message = choice["message"]
    assert message.get("tool_calls"), message
    (call,) = message["tool_calls"]
    assert message["reasoning"] == "a\nb"
    assert message["content"] == "Y"
    framed = {**request, "vllm_xargs": {"diffusion_frames": 1}}
    stream = OrderedStream(server, "/v1/chat/completions", framed)
    assert stream.frames[0]
    assert stream.choices[0].thought == message["reasoning"]
    assert stream.choices[0].text == message["content"]
    assert stream.arguments(0) == call["function"]["arguments"] == '{"a": 1}'
    assert stream.num_tokens == whole["usage"]["completion_tokens"]


# A call that the schema decides, after a thought that the model has learnt: neither endpoint takes
# a seed.
SUM = [{"role": "user", "content": "What is 7+8?"}]
BOB = {
    "type": "object",
    "properties": {"name": {"enum": ["bob"]}, "ages": {"const": [1, "1"]}},
    "required": ["name", "ages"],
    "additionalProperties": False,
}


def test_messages_stream_as_the_whole_message(server: Server) -> None:
    """A stream of ``/v1/messages`` has the whole message's thought, text and call."""
    body = {
        "model": MODEL,
        "messages": SUM,
        "tools": [{"name": "store", "input_schema": BOB}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "max_tokens": 1100,
        "temperature": 0.0,
    }
    whole = [
        (block["type"], block.get("thinking") or block.get("text") or block.get("input"))
        for block in server.post("/v1/messages", body).json()["content"]
    ]
    assert [kind for kind, _ in whole] == ["thinking", "tool_use"]
    kinds: dict[int, str] = {}
    texts: dict[int, str] = {}
    for event in events(server.post("/v1/messages", body | {"stream": True}).text):
        if event["type"] == "content_block_start":
            kinds[event["index"]] = event["content_block"]["type"]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            # A signature closes a thought.
            text = delta.get("thinking") or delta.get("text") or delta.get("partial_json") or ""
            texts[event["index"]] = texts.get(event["index"], "") + text
    assert [
        (kind, json.loads(texts[index]) if kind == "tool_use" else texts[index])
        for index, kind in kinds.items()
    ] == whole
    jsonschema.validate(whole[-1][1], BOB)


def test_responses_stream_as_the_whole_response(server: Server) -> None:
    """A stream of ``/v1/responses`` has the whole response's items."""
    body = {
        "model": MODEL,
        "input": SUM,
        "tools": [{"type": "function", "name": "store", "parameters": BOB}],
        "tool_choice": "required",
        "max_output_tokens": 200,
        "temperature": 0.0,
    }
    (whole,) = server.post("/v1/responses", body).json()["output"]
    assert whole["type"] == "function_call"
    arguments, last = "", {}
    for event in events(server.post("/v1/responses", body | {"stream": True}).text):
        if event["type"] == "response.function_call_arguments.delta":
            arguments += event["delta"]
        last = event
    assert last["type"] == "response.completed"
    (streamed,) = last["response"]["output"]
    assert (streamed["name"], streamed["arguments"]) == (whole["name"], whole["arguments"])
    assert arguments == whole["arguments"]
    jsonschema.validate(json.loads(arguments), BOB)
