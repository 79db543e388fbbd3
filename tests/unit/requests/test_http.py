"""Common fields of bodies are checked, and refusals are logged and counted."""

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY
from starlette.responses import JSONResponse
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import RetryableRequestError, VLLMValidationError
from vllm.renderers.base import BaseRenderer

from tests.support.engines.admission import refused
from tests.support.models.specs import diffusion_gemma_spec
from vllm_diffusion.requests import bounds, http
from vllm_diffusion.requests.http import BoundedPrompts, _noted, read_body

pytestmark = pytest.mark.engine

REFUSED = "vllm_diffusion:refused_requests_total"
LABELS = [{"field": field, "status": "400"} for field in ("top_p", "new", "newer", "other")]

CANVASES = SimpleNamespace(is_diffusion=True, max_model_len=100)
ORDINARY = SimpleNamespace(is_diffusion=False, max_model_len=100)


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "a"}], **fields)


def test_arguments_at_the_top_of_a_body() -> None:
    """A top-level ``diffusion_*`` field is read as one of ``vllm_xargs``."""
    request = chat(diffusion_max_steps=3, diffusion_step_map=True, vllm_xargs={"own": 1})
    read_body(request, CANVASES)
    assert request.vllm_xargs == {"own": 1, "diffusion_max_steps": 3, "diffusion_step_map": True}
    message = AnthropicMessagesRequest(
        model="m", max_tokens=5, messages=[{"role": "user", "content": "a"}]
    )
    read_body(message, CANVASES, {"diffusion_max_steps": 3})
    assert message.vllm_xargs == {"diffusion_max_steps": 3}


GUESS = {"type": "content", "content": "a"}
FILLS = SimpleNamespace(**vars(CANVASES), diffusion=SimpleNamespace(spec=diffusion_gemma_spec(8)))


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest(model="m", **{"prompt": "b"} | fields)


@pytest.mark.parametrize(
    ("request_", "fields"),
    [
        (chat(diffusion_step_map=True, vllm_xargs={"diffusion_step_map": 0}), "diffusion_step_map"),
        (completion(suffix="a", max_tokens=1, vllm_xargs={"diffusion_suffix": "b"}), "suffix"),
        (completion(suffix="a", max_tokens=1, diffusion_suffix="b"), "suffix"),
        (chat(prediction=GUESS, vllm_xargs={"diffusion_prediction": "prompt"}), "prediction"),
    ],
    ids=["at the top", "suffix", "suffix at the top", "prediction"],
)
def test_an_argument_given_twice(request_: Any, fields: str) -> None:
    """An argument with two values is refused with both of its fields, of which one was dropped."""
    with pytest.raises(
        VLLMValidationError,
        match=f"{fields} .* another .*diffusion_{fields.removeprefix('diffusion_')}",
    ):
        read_body(request_, FILLS)
    same = completion(suffix="a", max_tokens=1, vllm_xargs={"diffusion_suffix": "a"})
    read_body(same, FILLS)
    assert same.vllm_xargs == {"diffusion_suffix": "a"}


def test_fields_of_other_endpoints() -> None:
    """A prediction that an endpoint would drop, or send on in another form, is refused by name."""
    message = AnthropicMessagesRequest(model="m", max_tokens=5, messages=[])
    with refused("prediction", "prediction is not taken by this"):
        read_body(message, FILLS, {"prediction": GUESS})


@pytest.mark.parametrize(
    ("request_", "config", "field"),
    [
        # A suffix, and predictions, of which some are malformed.
        (completion(suffix="a", max_tokens=7), FILLS, None),
        (completion(prediction="a"), FILLS, "prediction"),
        (completion(prediction={"type": "content", "content": 5}), FILLS, "prediction"),
        (completion(prediction=GUESS), FILLS, None),
        # Beam search is left to vLLM for other models.
        (chat(use_beam_search=True, n=2), CANVASES, "use_beam_search"),
        (chat(use_beam_search=True, n=2), ORDINARY, None),
        # As long as the model's.
        (completion(prompt=[1] * 100), CANVASES, None),
        (completion(prompt=[1] * 101), CANVASES, "prompt"),
        (completion(prompt=[[1], [2] * 101]), CANVASES, "prompt"),
        (completion(prompt=[1] * 101, truncate_prompt_tokens=5), CANVASES, None),
        # As many answers as a body may have.
        (completion(prompt=["a"] * 64, n=bounds.MOST_ANSWERS // 64, max_tokens=6), CANVASES, None),
        (completion(prompt=["a"] * 64, n=bounds.MOST_ANSWERS // 64 + 1), CANVASES, "n"),
        (completion(prompt="a" * 1000, n=128), CANVASES, None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_known_of_a_body(request_: Any, config: Any, field: str | None) -> None:
    """What a body alone shows is refused by its field when the body is read."""
    if field is None:
        read_body(request_, config)
        return
    with refused(field):
        read_body(request_, config)


@pytest.mark.parametrize("effort", ["instant", "none", "turbo"])
def test_efforts(effort: str) -> None:
    """Chats and responses read "instant" as "none", and list it where another one is refused."""
    http.install()
    bodies = (
        lambda: chat(reasoning_effort=effort).reasoning_effort,
        lambda: ResponsesRequest(input="a", reasoning={"effort": effort}).reasoning.effort,
    )
    for read in bodies:
        if effort == "turbo":
            with pytest.raises(
                VLLMValidationError, match=r"effort must be one of instant, none, .*turbo"
            ):
                read()
        else:
            assert read() == "none"


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("guided_json", "structured_outputs.json"),
        ("guided_regex", "structured_outputs.regex"),
        ("guided_choice", "structured_outputs.choice"),
        ("guided_grammar", "structured_outputs.grammar"),
        ("guided_decoding_backend", "leave it out"),
    ],
)
def test_fields_of_older_releases(field: str, words: str) -> None:
    """An older vLLM's field for constraints is refused with the new name if that is not there."""
    with refused(field, words):
        read_body(chat(**{field: "a"}), ORDINARY)
    read_body(chat(**{field: None}), ORDINARY)
    read_body(chat(**{field: "a"}, structured_outputs={"regex": "a"}), ORDINARY)


def tokenized(prompt: dict[str, Any], truncation: int | None, side: str | None = None) -> Any:
    """Return the prompt that a renderer is given to tokenize, of at most 300 characters."""
    params = SimpleNamespace(truncate_prompt_tokens=truncation, truncation_side=side)

    class Renderer(BaseRenderer):
        async def tokenize_prompt_async(self, prompt: Any, params: Any) -> Any:
            return prompt

    bounded: Any = type("Bounded", (BoundedPrompts, Renderer), {})
    bounded.__abstractmethods__ = frozenset()
    renderer = object.__new__(bounded)
    renderer.model_config = CANVASES
    renderer.tokenizer = SimpleNamespace(max_chars_per_token=3, truncation_side="left")
    return asyncio.run(renderer.tokenize_prompt_async(prompt, params))


def test_characters_of_a_prompt() -> None:
    """Text longer than the longest prompt is refused before it is made tokens."""
    for prompt in ({"prompt": "a" * 300}, {"prompt_token_ids": [1] * 301}):
        assert tokenized(prompt, None) == prompt
    with refused("prompt", "301 characters.* at most 300 fit"):
        tokenized({"prompt": "a" * 301}, None)


@pytest.mark.parametrize(
    ("side", "kept"), [(None, "b" * 300), ("left", "b" * 300), ("right", "a" * 300)]
)
def test_characters_of_a_truncated_prompt(side: str | None, kept: str) -> None:
    """Of text that is truncated, no more than the longest prompt can have is made tokens."""
    assert tokenized({"prompt": "a" * 300 + "b" * 300}, 8, side) == {"prompt": kept}


@pytest.mark.parametrize(
    ("error", "said", "level", "has_trace"),
    [
        (
            VLLMValidationError("no\nline", parameter="seed"),
            "refused (400, seed): 'no",
            logging.INFO,
            False,
        ),
        (KeyError("26"), "failed (500): 'The server failed (KeyError)", logging.ERROR, True),
        (
            RetryableRequestError("a"),
            "failed (500): 'The server failed (Retr",
            logging.ERROR,
            False,
        ),
    ],
    ids=["refusal", "failure", "a server that is being stopped"],
)
def test_what_is_answered_is_noted(
    error: Exception, said: str, level: int, has_trace: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A refusal is logged as one line with field and reason, a failure with its trace."""

    async def stock(request: Any, raised: Exception) -> Any:
        status = 400 if isinstance(raised, VLLMValidationError) else 500
        message = raised.args[0] if status == 400 else ""
        info = {"message": message, "param": getattr(raised, "parameter", None), "code": status}
        return JSONResponse({"error": info}, status_code=status)

    request = SimpleNamespace(url=SimpleNamespace(path="/v1/completions"))
    with caplog.at_level(logging.INFO, logger="vllm.vllm_diffusion.requests.http"):
        logging.getLogger("vllm.vllm_diffusion.requests.http").addHandler(caplog.handler)
        response = asyncio.run(_noted(stock)(request, error))
    record = caplog.records[0]
    assert said in record.getMessage()
    assert "\n" not in record.getMessage()
    assert record.levelno == level
    assert bool(record.exc_info) == has_trace
    assert json.loads(response.body)["error"]["message"]


def test_refusals_are_counted_by_the_fields_there_are() -> None:
    """All invented names together add to one series, and take the place of no field's own."""
    http.know_fields(["top_p"])
    counted = [REGISTRY.get_sample_value(REFUSED, labels) or 0.0 for labels in LABELS]
    fields = [*("new", "newer", "body.new.0"), *(f"diffusion_{i}" for i in range(100))]
    for field in (*fields, "top_p", "body.top_p.17", "top_p[3]"):
        http._count_refusal(field, 400)
    now = [REGISTRY.get_sample_value(REFUSED, labels) or 0.0 for labels in LABELS]
    assert [after - before for after, before in zip(now, counted, strict=True)] == [3, 0, 0, 103]


def test_fields_of_a_servers_bodies() -> None:
    """The fields of each body that a route reads are found, and no others."""
    from fastapi import FastAPI

    app = FastAPI()

    @app.post("/v1/completions")
    async def create(request: CompletionRequest) -> None: ...

    @app.get("/health")
    async def health() -> None: ...

    assert {*http._fields_of_bodies(app)} == {*CompletionRequest.model_fields}
    http._serve_middles(app)
    (alias,) = (route for route in app.routes if route.path == "/v1/fim/completions")
    assert alias.endpoint is create
    assert alias.methods == {"POST"}


@pytest.mark.parametrize("body", [{"detail": "Not Found"}, None, "text", []], ids=repr)
def test_what_has_no_error_is_left_as_it_is(body: Any) -> None:
    """An answer that is not in vLLM's form, as for an unknown path, is sent unchanged."""
    made = object() if body is None else JSONResponse(body, status_code=404)

    async def stock(request: Any, raised: Exception) -> Any:
        return made

    assert asyncio.run(_noted(stock)(SimpleNamespace(), KeyError("a"))) is made
