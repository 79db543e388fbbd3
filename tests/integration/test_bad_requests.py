"""Every bad request gets a 400 that names its field, and the server answers the next one."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.server import MODEL, SHARED_MAX_MODEL_LEN, Server
from vllm_diffusion.requests.refusals import SECONDS_A_LINE

pytestmark = pytest.mark.engine

# Stands for the server's canvas width in the table below.
CANVAS = "canvas length"


@pytest.fixture(autouse=True)
def _alive(server: Server) -> Iterator[None]:
    """The proof after each test that the server still answers."""
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
    _assert_refused(_complete(server, prompt=[50] * SHARED_MAX_MODEL_LEN), "max_tokens")


def test_chat_longer_than_the_model_length(server: Server) -> None:
    """The same of a conversation."""
    _assert_refused(_chat(server, "x" * SHARED_MAX_MODEL_LEN), str(SHARED_MAX_MODEL_LEN))


def test_longest_prompt(server: Server) -> None:
    """One token of room is room: the canvas is cut at the model length."""
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
    """A prompt of nothing is refused by name."""
    _assert_refused(_complete(server, prompt=prompt), "prompt")


def test_empty_conversation(server: Server) -> None:
    """A conversation of no message is refused."""
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


BAD_DIFFUSION_ARGUMENTS = [
    ("diffusion_max_step", {"diffusion_max_step": 1}),
    ("diffusion_", {"diffusion_": 1}),
    *(
        ("diffusion_max_steps", {"diffusion_max_steps": value})
        for value in (0, -1, 1.5, "3", [1], float("nan"))
    ),
    *(
        ("diffusion_canvas_length", {"diffusion_canvas_length": value})
        for value in (0, -8, (CANVAS, 1), 2.0, "8", [8])
    ),
    *(
        ("diffusion_seed_canvas", {"diffusion_seed_canvas": value})
        for value in (5, "text", [], [4, 4], ["a"] * 4, [1.5] * 4)
    ),
    *(
        # Of the right length, each with one id that there is not.
        (
            "diffusion_seed_canvas",
            {"diffusion_canvas_length": 4, "diffusion_seed_canvas": [4, 4, 4, value]},
        )
        for value in (-1, 10**6)
    ),
    (
        "diffusion_seed_canvas",
        {"diffusion_canvas_length": 4, "diffusion_seed_canvas": [4, 4, 4, 4, 4]},
    ),
    ("diffusion_pinned", {"diffusion_pinned": [1]}),
    *(
        (name, {name: value})
        for name in (
            "diffusion_entropy_bound",
            "diffusion_confidence_threshold",
            "diffusion_t_min",
            "diffusion_t_max",
        )
        for value in (0, -1.5, "low", [0.1], float("nan"), float("inf"))
    ),
    *(
        ("diffusion_stability_threshold", {"diffusion_stability_threshold": value})
        for value in (-1, 0.5, "1")
    ),
    # The server's own are 0.8 and 0.4.
    ("diffusion_t_min", {"diffusion_t_min": 0.9}),
    ("diffusion_t_max", {"diffusion_t_max": 0.3}),
    ("diffusion_t_max", {"diffusion_t_max": 0.3, "diffusion_t_min": 0.5}),
    *(("diffusion_preset", {"diffusion_preset": value}) for value in ("slow", "", 1)),
    *(
        (
            "diffusion_pinned",
            {
                "diffusion_canvas_length": 4,
                "diffusion_seed_canvas": [4, 4, 4, 4],
                "diffusion_pinned": value,
            },
        )
        for value in ([4], [-1], "1", 1, [0.5], ["0"])
    ),
    *(
        ("diffusion_read_only", {"diffusion_read_only": value})
        for value in (2, -1, "yes", 0.5, [1])
    ),
    *(
        ("diffusion_constrained", {"diffusion_constrained": value})
        for value in (2, "yes", [1], True)
    ),
]


@pytest.mark.parametrize(
    ("field", "arguments"),
    BAD_DIFFUSION_ARGUMENTS,
    ids=lambda value: value if isinstance(value, str) else str(value)[:80],
)
def test_bad_diffusion_argument(field: str, arguments: dict[str, Any], server: Server) -> None:
    """An argument of the wrong type, range or combination is refused by its name."""
    arguments = {
        name: server.canvas_length + value[1] if isinstance(value, tuple) else value
        for name, value in arguments.items()
    }
    body = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "vllm_xargs": arguments}
    response = httpx.post(
        f"{server.url}/v1/completions",
        # Python's own encoder: NaN is not JSON, but it may be sent and servers read it.
        content=json.dumps(body),
        headers={"content-type": "application/json"},
        timeout=300,
    )
    _assert_refused(response, field)
    assert response.json()["error"]["param"] == field


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("value", [True, False, 5, "text", [], ["regex"]], ids=str)
def test_structured_outputs_that_are_no_object(path: str, value: Any, server: Server) -> None:
    """vLLM asks them for their keys before it has looked at their type."""
    messages = [{"role": "user", "content": "hi"}]
    prompt = {"messages": messages} if "chat" in path else {"prompt": "hi"}
    response = server.post(path, {**prompt, "max_tokens": 4, "structured_outputs": value})
    _assert_refused(response, "structured_outputs")
    assert response.json()["error"]["param"] == "structured_outputs"


@pytest.mark.parametrize("n", [129, 10_000])
def test_many_answers(n: int, server: Server) -> None:
    """One request cannot keep a server busy for minutes; how to allow it is said."""
    response = _complete(server, n=n)
    _assert_refused(response, "VLLM_MAX_N_SEQUENCES", "at most 128")
    assert response.json()["error"]["param"] == "n"
    assert "up to 128 answers" in server.log.read_text(errors="replace")


def test_log_of_refused_streams(server: Server) -> None:
    """Each is refused within its stream; the log has a line for many of them, and no stack trace."""
    before, begun = len(server.log.read_text(errors="replace")), time.monotonic()
    for i in range(40):
        bad = {"stream": True, "vllm_xargs": {"diffusion_max_step": i}}
        response = _complete(server, **bad) if i % 2 else _chat(server, "hi", **bad)
        assert "diffusion_max_step is not known" in response.text
    seconds = time.monotonic() - begun
    logged = server.log.read_text(errors="replace")[before:]
    assert "Traceback" not in logged
    lines = logged.count("A streamed request was refused")
    # Two of vLLM's modules, each of them once at first.
    assert 1 <= lines <= 2 * (1 + seconds / SECONDS_A_LINE)


def test_response_stream_that_is_refused(server: Server) -> None:
    """It ends with an event that says why, in place of a connection that breaks off."""
    asked = {"top_logprobs": 50, "include": ["message.output_text.logprobs"], "stream": True}
    response = server.post("/v1/responses", {"input": "a", "max_output_tokens": 4, **asked})
    last = response.text.strip().rpartition("\n\n")[2]
    assert last.startswith("event: error\ndata: ")
    event = json.loads(last.partition("data: ")[2])
    assert (event["type"], event["code"]) == ("error", "BadRequestError")
    assert "50" in event["message"]


REGEX = {"structured_outputs": {"regex": "a+"}}
BAD_SAMPLING_PARAMETERS = [
    ("temperature", {"temperature": -1.0}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": 1.5}),
    ("top_p", {"top_p": float("nan")}),
    ("top_k", {"top_k": -5}),
    ("min_p", {"min_p": 2.0}),
    ("min_p", {"min_p": float("nan")}),
    ("seed", {"seed": "seven"}),
    ("n", {"n": 0}),
    ("max_tokens", {"max_tokens": 0}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 5}),
    ("logprobs", {"logprobs": 10**4}),
    ("prompt_logprobs", {"prompt_logprobs": 10**4}),
    ("stop", {"stop": [""]}),
    ("stop_token_ids", {"stop_token_ids": [10**6]}),
    ("stop_token_ids", {"stop_token_ids": list(range(20, 220))}),
    ("presence_penalty", {"presence_penalty": 3.0}),
    ("presence_penalty", {"presence_penalty": float("nan")}),
    ("frequency_penalty", {"frequency_penalty": -3.0}),
    ("repetition_penalty", {"repetition_penalty": 0.0}),
    ("repetition_penalty", {"repetition_penalty": float("nan")}),
    ("logit_bias", {"logit_bias": {"1000000": 1.0}}),
    ("logit_bias", {"logit_bias": {"fifty": 1.0}}),
    ("allowed_token_ids", {"allowed_token_ids": []}),
    ("allowed_token_ids", {"allowed_token_ids": [10**6]}),
    ("allowed_token_ids", {"allowed_token_ids": ["a"]}),
    ("bad_words", {"bad_words": [""]}),
    ("bad_words", {"bad_words": [5]}),
    # Constraints.
    ("structured_outputs", {"structured_outputs": {"regex": "("}}),
    ("structured_outputs", {"structured_outputs": {"json": {"type": "nonsense"}}}),
    ("structured_outputs", {"structured_outputs": {"grammar": "this is none"}}),
    ("structured_outputs", {"structured_outputs": {"choice": []}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    ("min_tokens", {"min_tokens": 2, **REGEX}),
    ("ignore_eos", {"ignore_eos": True, **REGEX}),
    ("diffusion_read_only", {"vllm_xargs": {"diffusion_read_only": True}, **REGEX}),
    ("diffusion_read_only", {"vllm_xargs": {"diffusion_read_only": True}, "bad_words": ["x"]}),
    (
        "diffusion_constrained",
        {
            "vllm_xargs": {"diffusion_constrained": True},
            "logprobs": 1,
            "logprob_token_ids": [40],
            **REGEX,
        },
    ),
    (
        "diffusion_read_only",
        {"vllm_xargs": {"diffusion_read_only": True}, "thinking_token_budget": 20},
    ),
    ("thinking_token_budget", {"thinking_token_budget": -2}),
]
# Numbers that the engine's message, an integer or a float32 does not hold; the first was a 500. Other fields of
# ours are in tests/unit/requests.
NUMBERS_OUT_OF_BOUNDS = [
    ("top_k", {"top_k": 10**30}),
    *(
        (field, {field: value})
        for field in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
        )
        for value in (1e39, float("inf"), float("nan"))
    ),
    *(("repetition_penalty", {"repetition_penalty": float(value)}) for value in ("inf", "nan")),
    ("n", {"n": 10**6}),
    ("min_tokens", {"min_tokens": 10**30}),
]


def _complete_with(fields: dict[str, Any], server: Server) -> httpx.Response:
    """A completion with these fields, some of which no other encoder would write."""
    return httpx.post(
        f"{server.url}/v1/completions",
        # Python's own encoder, as above.
        content=json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 4, **fields}),
        headers={"content-type": "application/json"},
        timeout=300,
    )


@pytest.mark.parametrize(
    ("field", "fields"),
    BAD_SAMPLING_PARAMETERS,
    ids=lambda value: value if isinstance(value, str) else str(value),
)
def test_bad_sampling_parameter(field: str, fields: dict[str, Any], server: Server) -> None:
    """What is of the wrong type, out of range or contradicts itself is refused by its name.

    Except a ``logit_bias`` of NaN, which JSON cannot say and vLLM's protocol makes -100 of.
    """
    response = _complete_with(fields, server)
    _assert_refused(response, field)


@pytest.mark.parametrize(
    ("field", "fields"),
    NUMBERS_OUT_OF_BOUNDS,
    ids=lambda value: value if isinstance(value, str) else str(value),
)
def test_number_out_of_bounds(field: str, fields: dict[str, Any], server: Server) -> None:
    """What no field of the engine holds is refused, with the field where a client looks for it."""
    response = _complete_with(fields, server)
    _assert_refused(response, field)
    assert response.json()["error"]["param"] == field


def test_refused_stream(server: Server) -> None:
    """A stream's one event is the error: vLLM answers 200 before it looks at what is sampled."""
    with pytest.raises(openai.APIError, match="diffusion_max_steps") as raised:
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
    """A refusal does not touch what is being generated."""
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
