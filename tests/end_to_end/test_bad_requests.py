"""Every bad request gets a 400 that names its field, and the server answers the next one."""

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.robustness.requests import image_message, picture
from tests.support.engines.server import MODEL, SHARED_MAX_MODEL_LEN, Server

pytestmark = pytest.mark.engine

REFUSED = [
    (field, body)
    for field, bodies in tomllib.loads(
        Path(__file__).with_name("refused_requests.toml").read_text("utf-8")
    ).items()
    for body in bodies
]
# What a row without it sends besides.
CONTENT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/chat/completions/batch": {"messages": [[{"role": "user", "content": "hello"}]]},
}
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


def test_prompts_at_the_models_length(server: Server) -> None:
    """A prompt or conversation without room for a token is refused with the length that is allowed,
    and with room for one token the canvas is cut at that length.
    """
    most = SHARED_MAX_MODEL_LEN
    for num_tokens in (most + 1, 3 * most):
        _assert_refused(_complete(server, prompt=[50] * num_tokens), str(most), "prompt")
    response = _complete(server, prompt=[50] * most)
    _assert_refused(response, "max_tokens", "A prompt that fills the model's length")
    _assert_refused(_chat(server, "x" * most), str(most))
    # Text that no prompt has room for is not made tokens.
    _assert_refused(_chat(server, [{"type": "text", "text": "a" * 2**20}]), "prompt", "characters")
    quick = {"vllm_xargs": {"diffusion_max_steps": 1}, "ignore_eos": True}
    longest = _complete(server, prompt=[50] * (most - 1), **quick)
    assert longest.status_code == 200, longest.text
    assert longest.json()["usage"]["completion_tokens"] == 1


def test_conversations_that_are_none(server: Server) -> None:
    """A conversation without messages is refused, as is an image where the server has none."""
    response = server.post("/v1/chat/completions", {"messages": [], "max_tokens": 4})
    _assert_refused(response, "message")
    _assert_refused(_chat(server, image_message(picture())[0]["content"]), "image")


@pytest.mark.parametrize(
    ("field", "body"),
    REFUSED,
    ids=lambda value: value if isinstance(value, str) else str(value)[:80],
)
def test_bad_field(field: str, body: dict[str, Any], server: Server) -> None:
    """Each row of the table is refused by its field, in the message and as ``param``; no stream
    begins.

    Except a ``logit_bias`` of NaN, which JSON cannot spell and vLLM's protocol turns into -100.
    """
    path = body.get("path", "/v1/completions")
    own = CONTENT.get(path, {"messages": [{"role": "user", "content": "hello"}]})
    sent = {"model": MODEL, "max_tokens": 4, **own, **body}
    sent.pop("path", None)
    response = httpx.post(
        f"{server.url}{path}",
        # Python's own encoder: NaN is not JSON, but it may be sent and servers read it.
        content=json.dumps(sent),
        headers={"content-type": "application/json"},
        timeout=300,
    )
    _assert_refused(response, field)
    # A value of another JSON type is found by vLLM's protocol, which names its place in the body.
    # Anthropic's errors name no field.
    error = response.json()["error"]
    named = field if path == "/v1/messages" else error["param"].removeprefix("body.")
    assert named.partition(".")[0] == field


def test_malformed_schema(server: Server) -> None:
    """A schema with a keyword of a wrong type gets a 400 with its place, and is logged by the field
    in which the client sent it.
    """
    schema = {"type": "object", "required": 5}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    before = len(server.log.read_text(errors="replace"))
    for response in (
        _complete(server, structured_outputs={"json": schema}),
        _chat(server, "hi", structured_outputs={"json": schema}, stream=True),
        _chat(server, "hi", response_format=form),
        server.post("/v1/responses", {"input": "hi", "text": text}),
    ):
        _assert_refused(response, "#/")
    logged = server.log.read_text(errors="replace")[before:]
    for field, number in (("structured_outputs", 2), ("response_format", 1), ("text.format", 1)):
        assert logged.count(f" refused (400, {field}): ") == number
    assert "Traceback" not in logged
    assert "A streamed request was refused" not in logged


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


def test_many_objects(server: Server) -> None:
    """A body of too many objects is refused by their number, any other by its first bad item."""

    def said(num_objects: int, status: int) -> str:
        body = {"max_tokens": 4, "messages": [{}] * num_objects}
        response = server.post("/v1/chat/completions", body)
        assert response.status_code == status
        return str(response.json()["error"]["message"])

    assert "10002 objects and lists; the limit is 6400" in said(10_000, 413)
    # The first line is the number of errors.
    few, many = said(2, 400), said(6_000, 400)
    assert few.splitlines()[0] == many.splitlines()[0]


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


def test_pins_that_a_grammar_forbids(server: Server) -> None:
    """What only the engine finds, as that a grammar forbids a pinned token, is a 400 too."""
    # A canvas of "d".
    pins = {"diffusion_canvas_length": 4, "diffusion_seed_canvas": [91] * 4}
    response = _complete(
        server,
        structured_outputs={"regex": "[a-c]{4}"},
        vllm_xargs=pins | {"diffusion_pinned": [2]},
    )
    _assert_refused(response, "diffusion_pinned 2")


def test_many_answers(server: Server) -> None:
    """A request for too many answers is refused with the option that allows more."""
    _assert_refused(_complete(server, n=129), "VLLM_MAX_N_SEQUENCES", "at most 128")
    assert "up to 128 answers" in server.log.read_text(errors="replace")
