"""Every bad request gets a 400 that names its field, and the server answers the next one."""

from __future__ import annotations

import base64
import io
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.engines.server import MODEL, SHARED_MAX_MODEL_LEN, Server

pytestmark = pytest.mark.engine

REFUSED = [
    (field, body)
    for field, bodies in tomllib.loads(
        Path(__file__).with_name("refused_requests.toml").read_text("utf-8")
    ).items()
    for body in bodies
]
REFUSED.append(("stop_token_ids", {"stop_token_ids": list(range(20, 220))}))


@pytest.fixture(autouse=True)
def _alive(server: Server) -> Iterator[None]:
    """Check after each test that the server still answers."""
    yield
    server.assert_alive()


def _assert_refused(response: Any, *words: str) -> None:
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    for word in words:
        assert word in message


def _complete(server: Server, **fields: Any) -> Any:
    return server.post("/v1/completions", {"prompt": "hello", "max_tokens": 4, **fields})


def _chat(server: Server, content: Any, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4, **fields})


@pytest.mark.parametrize("num_tokens", [SHARED_MAX_MODEL_LEN + 1, 3 * SHARED_MAX_MODEL_LEN])
def test_prompt_longer_than_the_model_length(num_tokens: int, server: Server) -> None:
    """A prompt that does not fit is refused with the length that is allowed."""
    _assert_refused(
        _complete(server, prompt=[50] * num_tokens), str(SHARED_MAX_MODEL_LEN), "prompt"
    )


def test_prompt_as_long_as_the_model_length(server: Server) -> None:
    """A prompt that leaves no room for a token is refused."""
    response = _complete(server, prompt=[50] * SHARED_MAX_MODEL_LEN)
    _assert_refused(response, "max_tokens", "A prompt that fills the model's length")


def test_chat_longer_than_the_model_length(server: Server) -> None:
    """A conversation that does not fit is refused with the length that is allowed."""
    _assert_refused(_chat(server, "x" * SHARED_MAX_MODEL_LEN), str(SHARED_MAX_MODEL_LEN))


def test_longest_prompt(server: Server) -> None:
    """With room for one token the canvas is cut at the model's length."""
    response = _complete(
        server,
        prompt=[50] * (SHARED_MAX_MODEL_LEN - 1),
        vllm_xargs={"diffusion_max_steps": 1},
        ignore_eos=True,
    )
    assert response.status_code == 200, response.text
    assert response.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("prompt", ["", []], ids=["empty text", "no token"])
def test_empty_prompt(prompt: Any, server: Server) -> None:
    """An empty prompt is refused by name."""
    _assert_refused(_complete(server, prompt=prompt), "prompt")


def test_empty_conversation(server: Server) -> None:
    """A conversation without messages is refused."""
    response = server.post("/v1/chat/completions", {"messages": [], "max_tokens": 4})
    _assert_refused(response, "message")


def test_prompt_of_unknown_token(server: Server) -> None:
    """An id beyond the vocabulary is refused by its number."""
    _assert_refused(_complete(server, prompt=[5, 10**6]), "1000000", "vocabulary")


def test_image_sent_to_a_text_only_server(server: Server) -> None:
    """An image is refused by name where the server was started without images."""
    image = pytest.importorskip("PIL.Image").new("RGB", (16, 16))
    content = io.BytesIO()
    image.save(content, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    parts = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": url}}]
    _assert_refused(_chat(server, parts), "image")


@pytest.mark.parametrize(
    ("field", "body"),
    REFUSED,
    ids=lambda value: value if isinstance(value, str) else str(value)[:80],
)
def test_bad_field(field: str, body: dict[str, Any], server: Server) -> None:
    """Each row of the table is refused by its field, in the message and as ``param``.

    Except a ``logit_bias`` of NaN, which JSON cannot spell and vLLM's protocol turns into -100.
    """
    response = httpx.post(
        f"{server.url}/v1/completions",
        # Python's own encoder: NaN is not JSON, but it may be sent and servers read it.
        content=json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4, **body}),
        headers={"content-type": "application/json"},
        timeout=300,
    )
    _assert_refused(response, field)
    # A value of another JSON type is found by vLLM's protocol, which names its place in the body.
    named = response.json()["error"]["param"].removeprefix("body.")
    assert named.partition(".")[0] == field


@pytest.mark.parametrize("value", [True, False, 5, "text", [], ["regex"]], ids=str)
def test_structured_outputs_that_are_no_object(value: Any, server: Server) -> None:
    """Structured outputs that are not an object are refused in a conversation too.

    vLLM reads their keys before it checks their type.
    """
    response = _chat(server, "hi", structured_outputs=value)
    _assert_refused(response, "structured_outputs")
    assert response.json()["error"]["param"] == "structured_outputs"


MALFORMED: list[Any] = [
    {"type": 5},
    {"type": 1.5},
    {"type": "object", "required": 5},
    {"type": "integer", "multipleOf": True},
    {"type": "integer", "multipleOf": 0},
    {"properties": []},
    {"propertyNames": {"pattern": ["a"]}},
    {"minProperties": "x"},
    {"oneOf": [{"type": False}, {"type": "string"}]},
    {"allOf": 3, "format": "date", "pattern": "a"},
    {"prefixItems": 5},
    {"$defs": {"a": 5}},
]


@pytest.mark.parametrize("schema", MALFORMED, ids=str)
def test_malformed_schema(schema: dict[str, Any], server: Server) -> None:
    """A schema with a keyword of a wrong type gets a 400 with its place, and is logged by the field
    in which the client sent it.
    """
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    before = len(server.log.read_text(errors="replace"))
    for response in (
        _complete(server, structured_outputs={"json": schema}),
        _chat(server, "hi", response_format=form),
        server.post("/v1/responses", {"input": "hi", "text": text}),
    ):
        _assert_refused(response, "#/")
    logged = server.log.read_text(errors="replace")[before:]
    for field in ("structured_outputs", "response_format", "text.format"):
        assert logged.count(f" refused (400, {field}): ") == 1
    assert "Traceback" not in logged


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"use_beam_search": True, "n": 2}, "use_beam_search"),
        ({"diffusion_max_steps": 0}, "diffusion_max_steps"),
        ({"diffusion_max_step": 1}, "diffusion_max_step"),
    ],
    ids=str,
)
def test_fields_that_would_be_ignored(fields: dict[str, Any], field: str, server: Server) -> None:
    """A field that vLLM's protocol silently ignores is refused by its name, or honored."""
    for response in (_complete(server, **fields), _chat(server, "hi", **fields)):
        _assert_refused(response, field)
        assert response.json()["error"]["param"] == field


def test_thread_of_anthropic(server: Server) -> None:
    """A conversation to be kept by the server is refused with details by which SDKs resend it."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"max_tokens": 4, "messages": messages, "thread": {"id": "a"}}
    response = server.post("/v1/messages", body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "thread" in error["message"]
    assert server.post("/v1/messages", {**body, "thread": None}).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"null", b"[]", b'{"a":' * 2000])
def test_bodies_that_are_no_object(body: bytes, server: Server) -> None:
    """A body that is not a JSON object gets a 400 on every path, and an unknown path a 404."""
    headers = {"content-type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert httpx.post(server.url + path, content=body, headers=headers).status_code == 400
    assert httpx.post(server.url + "/v1/nothing", content=body, headers=headers).status_code == 404


def test_long_body(server: Server) -> None:
    """A body with more text than any prompt is refused by its length."""
    response = _complete(server, prompt="a" * (9 * 2**20))
    assert response.status_code == 413
    assert response.json()["error"]["param"] == "body"


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
        ("/tokenize", "messages"),
        ("/invocations", "input"),
    ],
)
def test_many_objects(path: str, field: str, server: Server) -> None:
    """A body of too many objects is refused by their number, any other by its first bad item."""
    response = server.post(path, {"max_tokens": 4, field: [{}] * 10_000})
    assert response.status_code == 413
    assert "10002 objects and lists; the limit is 6400" in response.json()["error"]["message"]
    # The first line is the number of errors.
    few, many = (
        server.post(path, {"max_tokens": 4, field: [{}] * n}).json()["error"]["message"]
        for n in (2, 6_000)
    )
    assert few.splitlines()[0] == many.splitlines()[0]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 2**20}]}]},
        {
            "messages": [{"role": "user", "content": "hi"}],
            "tools": [{"type": "function", "function": {"name": "f", "description": "a" * 2**20}}],
        },
    ],
    ids=["parts", "tools"],
)
def test_text_anywhere_in_a_prompt(body: Any, server: Server) -> None:
    """Text that no prompt has room for is refused wherever a template takes it from."""
    for path in ("/tokenize", "/v1/chat/completions"):
        _assert_refused(server.post(path, body), "prompt", "characters")


def test_text_that_is_truncated(server: Server) -> None:
    """Of text that is truncated the same tokens are read, however much text precedes them."""
    asked = {"max_tokens": 4, "truncate_prompt_tokens": 8, "temperature": 0, "seed": 1}
    said = [
        _complete(server, prompt="a" * n + " 7+8", **asked).json()["choices"][0]["text"]
        for n in (1_000, 2**22)
    ]
    assert said[0] == said[1]


def test_many_long_answers(server: Server) -> None:
    """A short answer comes while a body of thousands of long ones is served, which then leaves."""
    body = {"model": MODEL, "prompt": ["Once"] * 16, "n": 128, "max_tokens": 900, "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body | {"ignore_eos": True}, timeout=300
    ) as many:
        lines = many.iter_lines()
        assert next(lines).startswith("data: ")
        assert _complete(server).status_code == 200
        # In the order of arrival all of them would have begun before it.
        assert server.metric("vllm:num_requests_waiting") > 1000
    server.wait_until_idle()


DEEP = '{"a":' * 3000 + "1" + "}" * 3000
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": DEEP}}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        *(
            (path, body | {"structured_outputs": {"json": text}}, "structured_outputs")
            for path, body in (
                ("/v1/completions", {"prompt": "hello"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
                ("/v1/responses", {"input": "hi"}),
            )
            for text in (
                DEEP,
                '{"enum": [-9223372036854775808], "pattern": "a"}',
                '{"multipleOf": 999983}',
            )
        ),
        ("/tokenize", {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, "messages"),
    ],
)
def test_text_that_holds_json(path: str, body: Any, field: str, server: Server) -> None:
    """JSON within text is refused as in a body, and neither fails nor ends the server."""
    _assert_refused(server.post(path, body), field)


@pytest.mark.parametrize("n", [129, 10_000])
def test_many_answers(n: int, server: Server) -> None:
    """A request for too many answers is refused with the option that allows more."""
    response = _complete(server, n=n)
    _assert_refused(response, "VLLM_MAX_N_SEQUENCES", "at most 128")
    assert response.json()["error"]["param"] == "n"
    assert "up to 128 answers" in server.log.read_text(errors="replace")


def test_log_of_refused_streams(server: Server) -> None:
    """A refused stream logs the line of any refusal, and no stack trace."""
    before = len(server.log.read_text(errors="replace"))
    for i in range(20):
        bad = {"stream": True, "vllm_xargs": {"diffusion_max_step": i}}
        response = _complete(server, **bad) if i % 2 else _chat(server, "hi", **bad)
        _assert_refused(response, "diffusion_max_step is unknown")
    logged = server.log.read_text(errors="replace")[before:]
    assert "Traceback" not in logged
    assert logged.count(" refused (400, diffusion_max_step): ") == 20
    assert "A streamed request was refused" not in logged


def test_response_stream_that_is_refused(server: Server) -> None:
    """A response that is refused is so before its stream begins, as one that is not streamed."""
    asked = {"top_logprobs": 50, "include": ["message.output_text.logprobs"]}
    body = {"input": "a", "max_output_tokens": 4, **asked}
    streamed, whole = (
        server.post("/v1/responses", body | {"stream": stream}) for stream in (True, False)
    )
    _assert_refused(streamed, "50")
    assert streamed.json() == whole.json()


def test_refused_stream(server: Server) -> None:
    """A refused stream is a 400 before its first event, where vLLM answers 200 first."""
    with pytest.raises(openai.BadRequestError, match="diffusion_max_steps") as raised:
        list(
            server.client().completions.create(
                model=MODEL,
                prompt="hello",
                stream=True,
                extra_body={"vllm_xargs": {"diffusion_max_steps": 0}},
            )
        )
    assert raised.value.body["code"] == 400
    assert raised.value.body["param"] == "diffusion_max_steps"


def test_refused_request_beside_a_running_one(server: Server) -> None:
    """A refusal does not change what is being generated."""
    client = server.client()
    request = {
        "model": MODEL,
        "prompt": "hello",
        "max_tokens": 3 * server.canvas_length,
        "seed": 7,
        "extra_body": {"ignore_eos": True, "vllm_xargs": {"diffusion_max_steps": 2}},
    }
    expected = client.completions.create(**request).choices[0].text
    text = ""
    with client.completions.create(**request, stream=True) as stream:
        for chunk in stream:
            text += chunk.choices[0].text
            _assert_refused(
                _complete(server, vllm_xargs={"diffusion_max_steps": "no"}), "diffusion_max_steps"
            )
    assert text == expected
