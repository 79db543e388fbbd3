"""What vLLM's protocols of bodies leave out: a constraint in another server's spelling is held to,
or refused by its name, and a list is read up to its first bad item.
"""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import (
    BatchChatCompletionRequest,
    ChatCompletionRequest,
)
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeRequest
from vllm.exceptions import VLLMValidationError

from tests.support.engines.admission import refused
from vllm_diffusion.requests.first_errors import stop_at_first_errors
from vllm_diffusion.requests.spellings import read_spellings

pytestmark = pytest.mark.engine

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
OTHER = {"type": "object"}
OWN = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
MESSAGES = [{"role": "user", "content": "a"}]
LLAMA = {"type": "json_object", "schema": SCHEMA}


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=MESSAGES, **fields)


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest(prompt="a", **fields)


def read(request: Any) -> Any:
    """Return the constraint of a body after it was read."""
    read_spellings(request, request.model_extra or {})
    return request.extract_structured_outputs()


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"response_format": LLAMA}, "json", SCHEMA),
        ({"response_format": {"type": "json_object", "schema": {}}}, "json_object", True),
        ({"response_format": {**OWN, "type": "json_object"}}, "json", SCHEMA),
        ({"format": "json"}, "json_object", True),
        ({"format": SCHEMA}, "json", SCHEMA),
        ({"nvext": {"guided_json": SCHEMA}}, "json", SCHEMA),
        ({"nvext": {"guided_regex": "a+"}}, "regex", "a+"),
        ({"nvext": {"guided_choice": ["a"]}}, "choice", ["a"]),
        # The same twice contradicts nothing.
        ({"format": SCHEMA, "response_format": LLAMA}, "json", SCHEMA),
        ({"format": SCHEMA, "response_format": OWN}, "json", SCHEMA),
        ({"format": SCHEMA, "structured_outputs": {"json": SCHEMA}}, "json", SCHEMA),
        # Stays as it is.
        ({"response_format": OWN}, "json", SCHEMA),
        ({"response_format": {"type": "json_object"}}, "json_object", True),
        ({"nvext": {"ignore_eos": True}, "structured_outputs": {"regex": "b"}}, "regex", "b"),
    ],
    ids=str,
)
@pytest.mark.parametrize("make", [chat, completion], ids=["chat", "completion"])
def test_spellings(make: Any, fields: dict[str, Any], field: str, value: Any) -> None:
    """A schema or expression in a known spelling becomes the constraint of the request."""
    assert getattr(read(make(**fields)), field) == value


@pytest.mark.parametrize("fields", [{"format": ""}, {"grammar": ""}, {"json_schema": {}}, {}])
def test_fields_that_are_empty(fields: dict[str, Any]) -> None:
    """Another server's field that is empty, as front ends send it, constrains nothing."""
    assert read(chat(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format", "json_object"),
        ({"response_format": {**OWN, "schema": OTHER}}, "response_format", "json_object"),
        ({"response_format": {**LLAMA, "schema": "a"}}, "response_format", "object"),
        ({"format": "yaml"}, "format", '"json"'),
        ({"format": 5}, "format", '"json"'),
        ({"output_format": {"type": "json_schema"}}, "output_format", "response_format"),
        ({"grammar": "root ::= 'a'"}, "grammar", "structured_outputs.grammar"),
        ({"json_schema": SCHEMA}, "json_schema", "structured_outputs.json"),
        ({"regex": "a"}, "regex", "structured_outputs.regex"),
        ({"format": OTHER, "response_format": OWN}, "format", "response_format"),
        ({"format": OTHER, "response_format": LLAMA}, "response_format", "format"),
        ({"format": "json", "structured_outputs": {"regex": "a"}}, "format", "structured_outputs"),
        (
            {"response_format": LLAMA, "structured_outputs": {"regex": "a"}},
            "response_format",
            "structured_outputs",
        ),
        ({"nvext": {"guided_regex": "a"}, "response_format": OWN}, "nvext", "response_format"),
    ],
    ids=str,
)
def test_refused(fields: dict[str, Any], field: str, words: str) -> None:
    """What has no equal here, or contradicts the request's own constraint, is refused by name."""
    with refused(field, words):
        read(chat(**fields))


def test_responses() -> None:
    """A response holds to a schema beside the type of JSON, and to Ollama's field."""
    for fields in ({"text": {"format": LLAMA}}, {"format": SCHEMA}):
        assert read(ResponsesRequest(input="a", **fields)).json == SCHEMA
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    own: dict[str, Any] = {"input": "a", "text": {"format": form}}
    assert read(ResponsesRequest(**own)).json == SCHEMA
    assert read(ResponsesRequest(**own, format=SCHEMA)).json == SCHEMA
    with pytest.raises(VLLMValidationError, match=r"text\.format"):
        read(ResponsesRequest(**own, format=OTHER))


def test_batches() -> None:
    """The conversations of a batch hold to the schema as a chat does."""
    batch = BatchChatCompletionRequest(messages=[MESSAGES], response_format=LLAMA)
    read_spellings(batch, batch.model_extra or {})
    (conversation,) = batch.messages
    one = batch.to_chat_completion_request(conversation)
    assert one.extract_structured_outputs().json == SCHEMA


def test_messages() -> None:
    """A message holds to the schema of the field that Anthropic's beta had."""
    form = {"type": "json_schema", "schema": SCHEMA}

    def message(**fields: Any) -> AnthropicMessagesRequest:
        return AnthropicMessagesRequest(model="m", max_tokens=5, messages=MESSAGES, **fields)

    request = message(output_config={"effort": "low"})
    read_spellings(request, {"output_format": form})
    assert request.output_config is not None
    assert request.output_config.effort == "low"
    assert request.output_config.format is not None
    assert request.output_config.format.json_schema == SCHEMA
    other = message(output_config={"format": {**form, "schema": OTHER}})
    for own, sent, field in (
        (other, {"output_format": form}, "output_format"),
        (message(), {"output_format": {"type": "text"}}, "output_format"),
        (message(), {"format": "json"}, "format"),
    ):
        with refused(field):
            read_spellings(own, sent)


USER = MESSAGES[0]
LISTS: dict[str, tuple[Any, Any]] = {
    "messages": (ChatCompletionRequest, lambda items: {"messages": items}),
    "tools": (ChatCompletionRequest, lambda items: {"messages": [USER], "tools": items}),
    "tokenize": (TokenizeRequest, lambda items: {"messages": items}),
    "input": (ResponsesRequest, lambda items: {"input": items}),
    "parts": (ResponsesRequest, lambda items: {"input": [{"role": "user", "content": items}]}),
    "tools of responses": (ResponsesRequest, lambda items: {"input": "x", "tools": items}),
    "Anthropic's": (AnthropicMessagesRequest, lambda items: {"max_tokens": 1, "messages": items}),
    "stop": (CompletionRequest, lambda items: {"prompt": "x", "stop": [*items, None]}),
    "prompts": (CompletionRequest, lambda items: {"prompt": [1, *items, None]}),
}


def errors_of(adapter: TypeAdapter[Any], body: dict[str, Any]) -> int:
    """Count the errors of a body: none if it is taken."""
    try:
        adapter.validate_python(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("item", [{}, [], 1, "", {"role": "user", "content": [{}]}], ids=repr)
@pytest.mark.parametrize("name", LISTS)
def test_errors_do_not_grow_with_a_list(name: str, item: Any) -> None:
    """A list of a hundred bad items has as many errors as a list of two."""
    protocol, body = LISTS[name]
    adapter = TypeAdapter(protocol)
    stop_at_first_errors()
    few, many = (errors_of(adapter, {"model": "m", **body([item] * n)}) for n in (2, 100))
    assert few == many


def test_what_is_taken_is_read_as_before() -> None:
    """A body without a bad item is read as by vLLM's protocol."""
    body = {
        "model": "m",
        "messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}, USER],
        "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "list"}}}],
        "logit_bias": {"5": 1.0},
    }
    adapter = TypeAdapter(ChatCompletionRequest)
    stock = adapter.validate_python(body)
    stop_at_first_errors()
    read = adapter.validate_python(body)
    chosen = {"request_id"}
    assert read.model_dump_json(exclude=chosen) == stock.model_dump_json(exclude=chosen)
