"""Protocols of bodies stop at the first bad item of a list."""

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeRequest

from vllm_diffusion.requests.first_errors import stop_at_first_errors

pytestmark = pytest.mark.engine

USER = {"role": "user", "content": "x"}


def errors_of(adapter: TypeAdapter[Any], body: dict[str, Any]) -> int:
    """Count the errors of a body: none if it is taken."""
    try:
        adapter.validate_python(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("item", [{}, [], 1, "", {"role": "user", "content": [{}]}], ids=repr)
@pytest.mark.parametrize(
    ("protocol", "body"),
    [
        (ChatCompletionRequest, lambda items: {"messages": items}),
        (ChatCompletionRequest, lambda items: {"messages": [USER], "tools": items}),
        (TokenizeRequest, lambda items: {"messages": items}),
        (ResponsesRequest, lambda items: {"input": items}),
        (ResponsesRequest, lambda items: {"input": [{"role": "user", "content": items}]}),
        (ResponsesRequest, lambda items: {"input": "x", "tools": items}),
        (AnthropicMessagesRequest, lambda items: {"max_tokens": 1, "messages": items}),
        (CompletionRequest, lambda items: {"prompt": "x", "stop": [*items, None]}),
        (CompletionRequest, lambda items: {"prompt": [1, *items, None]}),
    ],
    ids=[
        "messages",
        "tools",
        "tokenize",
        "input",
        "parts",
        "tools of responses",
        "Anthropic's",
        "stop",
        "prompts",
    ],
)
def test_errors_do_not_grow_with_a_list(protocol: Any, body: Any, item: Any) -> None:
    """A list of a hundred bad items has as many errors as a list of two."""
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
