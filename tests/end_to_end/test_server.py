"""Tests of the real server and the clients that people use with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.end_to_end.test_tools import RECORD
from tests.support.engines.server import MODEL, Server

pytestmark = pytest.mark.engine

MESSAGES = [{"role": "user", "content": "What is 7+8?"}]
# Keeps a request short whatever the weights are.
QUICK = {"vllm_xargs": {"diffusion_max_steps": 2}}


@pytest.fixture(autouse=True)
def _idle(server: Server) -> Iterator[None]:
    """Check that no test leaves a request or a KV block in use."""
    yield
    server.wait_until_idle()


def _streamed(chunks: Any) -> tuple[str, str | None, Any]:
    """Return text, finish reason and usage of a stream of either kind."""
    text, reason, usage = "", None, None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += (choice.delta.content or "") if hasattr(choice, "delta") else choice.text
            reason = choice.finish_reason or reason
    return text, reason, usage


@pytest.mark.parametrize("kind", ["chat", "plain"])
def test_completion_streamed_and_not(kind: str, server: Server) -> None:
    """The same seed gives the same text, whole, repeated and in a stream."""
    client = server.client()
    if kind == "chat":
        create: Any = client.chat.completions.create
        prompt: dict[str, Any] = {"messages": MESSAGES}
    else:
        create = client.completions.create
        prompt = {"prompt": "Once upon a time"}
    max_tokens = 2 * server.canvas_length + 3
    request = {
        "model": MODEL,
        **prompt,
        "max_tokens": max_tokens,
        "seed": 5,
        "extra_body": {**QUICK, "ignore_eos": True},
    }
    whole = create(**request)
    choice = whole.choices[0]
    text = choice.message.content if kind == "chat" else choice.text
    assert choice.finish_reason == "length"
    assert whole.usage.completion_tokens == max_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + max_tokens

    again = create(**request).choices[0]
    assert (again.message.content if kind == "chat" else again.text) == text

    with create(**request, stream=True, stream_options={"include_usage": True}) as stream:
        streamed, reason, usage = _streamed(stream)
    assert (streamed, reason) == (text, "length")
    assert usage.completion_tokens == max_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens


def test_request_parameters(server: Server) -> None:
    """A request with every parameter of OpenAI's client and vLLM is answered."""
    response = server.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "system", "content": "Be brief."}, *MESSAGES],
        max_completion_tokens=40,
        temperature=0.7,
        top_p=0.9,
        n=2,
        seed=3,
        stop=["zzz"],
        logprobs=True,
        top_logprobs=2,
        logit_bias={"60": 1.5},
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        user="somebody",
        extra_body={
            "top_k": 5,
            "min_p": 0.01,
            "repetition_penalty": 1.1,
            "min_tokens": 4,
            "stop_token_ids": [300],
            "allowed_token_ids": list(range(1, 316)),
            "bad_words": ["15"],
            "prompt_logprobs": 1,
            "vllm_xargs": {
                "diffusion_max_steps": 3,
                "diffusion_preset": "fast",
                "diffusion_entropy_bound": 0.2,
                "diffusion_confidence_threshold": 0.01,
                "diffusion_stability_threshold": 1,
                "diffusion_t_min": 0.5,
                "diffusion_t_max": 0.9,
                "diffusion_canvas_length": 16,
            },
        },
    )
    assert len(response.choices) == 2
    tokens = [item for choice in response.choices for item in choice.logprobs.content]
    assert len(tokens) == response.usage.completion_tokens >= 8
    assert all(item.logprob <= 0.0 and len(item.top_logprobs) == 2 for item in tokens)
    assert all("15" not in (choice.message.content or "") for choice in response.choices)
    assert len(response.prompt_logprobs) == response.usage.prompt_tokens


def test_pinned_tokens(server: Server) -> None:
    """An answer begins with its pinned tokens; a grammar that forbids them gets a 400."""
    (letter,) = server.post("/tokenize", {"prompt": "d", "add_special_tokens": False}).json()[
        "tokens"
    ]
    xargs = {"diffusion_seed_canvas": [letter] * 32, "diffusion_pinned": [0, 1, 2, 3]}
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "max_tokens": 32,
        "temperature": 0.0,
        "logprobs": True,
    }
    answer = server.client().chat.completions.create(**asked, extra_body={"vllm_xargs": xargs})
    assert answer.choices[0].message.content.startswith("dddd")
    assert [item.token for item in answer.choices[0].logprobs.content[:4]] == ["d"] * 4
    form = {"structured_outputs": {"regex": "dd[0-9]+"}, "vllm_xargs": xargs}
    with pytest.raises(openai.BadRequestError, match="diffusion_pinned 2"):
        server.client().chat.completions.create(**asked, extra_body=form)


def test_prediction(server: Server) -> None:
    """Only a chat with a ``prediction`` counts it in the usage, streamed or not."""
    create: Any = server.client().chat.completions.create
    text = "12, 13, 14, 15, 16"
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Count from 12 to 16."}],
        "max_tokens": 64,
        "seed": 3,
        "n": 2,
    }
    prediction = {"type": "content", "content": [{"type": "text", "text": text}]}
    usage = create(**asked, prediction=prediction).usage
    details = usage.completion_tokens_details
    assert 0 < details.accepted_prediction_tokens <= usage.completion_tokens
    assert details.rejected_prediction_tokens >= 0
    for extra in ({}, {"diffusing": True}):
        with create(
            **asked,
            prediction=prediction,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        ) as stream:
            streamed = _streamed(chunk for chunk in stream if chunk.usage or chunk.choices)
        assert streamed[2].completion_tokens == usage.completion_tokens
        assert streamed[2].completion_tokens_details == details
    plain = create(**asked).usage.completion_tokens_details
    assert plain is None or plain.accepted_prediction_tokens is None
    for wrong in ("text", {"type": "text", "content": text}, {"type": "content", "content": [5]}):
        with pytest.raises(openai.BadRequestError, match="prediction"):
            create(**asked, extra_body={"prediction": wrong})
    xargs = {"diffusion_seed_canvas": [5] * 32}
    with pytest.raises(openai.BadRequestError, match="diffusion_seed_canvas"):
        create(**asked, prediction=prediction, extra_body={"vllm_xargs": xargs})


def test_plain_completion_echoes_its_prompt_with_logprobs(server: Server) -> None:
    """An echoed prompt has the log-probabilities that harnesses read."""
    response = server.client().completions.create(
        model=MODEL, prompt="one two", echo=True, logprobs=1, max_tokens=1, temperature=0.0
    )
    (choice,) = response.choices
    assert choice.text.startswith("one two")
    # A token per byte, and one that was generated.
    assert len(choice.logprobs.token_logprobs) == 8
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value <= 0.0 for value in choice.logprobs.token_logprobs[1:])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_response_format(stream: bool, server: Server) -> None:
    """An answer satisfies a JSON schema as the openai client sends it."""
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Make a JSON record: name bob, age 31."}],
        "max_tokens": 96,
        "seed": 1,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "record", "schema": RECORD, "strict": True},
        },
    }
    if stream:
        with server.client().chat.completions.create(**request, stream=True) as chunks:
            text, finish_reason, _ = _streamed(chunks)
    else:
        (choice,) = server.client().chat.completions.create(**request).choices
        text, finish_reason = choice.message.content, choice.finish_reason
    assert finish_reason == "stop"
    assert json.loads(text) == {"name": "bob", "age": 31}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_thinking(stream: bool, server: Server) -> None:
    """With thinking off the answer is the same without the thought, which is a field of its own."""
    request: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is 7+8?"}],
        "max_tokens": 96,
        "seed": 1,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }
    client = server.client()
    if stream:
        answer = thought = ""
        with client.chat.completions.create(**request, stream=True) as chunks:
            for chunk in chunks:
                for choice in chunk.choices:
                    answer += choice.delta.content or ""
                    thought += getattr(choice.delta, "reasoning", None) or ""
    else:
        (choice,) = client.chat.completions.create(**request).choices
        answer, thought = choice.message.content, choice.message.reasoning
    assert answer.strip() == "15"
    assert "sums" in thought


def test_counters(server: Server) -> None:
    """The ``vllm_diffusion:*`` counters report exactly what one request took."""
    names = ("passes", "encode_rows", "canvas_rows", "projected_rows", "denoise_steps", "canvases")

    def counters() -> dict[str, float]:
        server.wait_until_idle()
        return {name: server.metric(f"vllm_diffusion:{name}_total") for name in names}

    def ask(prompt: str) -> Any:
        return server.client().completions.create(
            model=MODEL,
            prompt=prompt,
            max_tokens=server.canvas_length,
            extra_body={"vllm_xargs": {"diffusion_max_steps": 1}, "ignore_eos": True},
        )

    ask("first")
    before = counters()
    usage = ask("Nothing like it before").usage
    moved = {name: value - before[name] for name, value in counters().items()}
    assert moved["denoise_steps"] == 1
    assert moved["canvases"] == 1
    assert moved["canvas_rows"] == server.canvas_length
    # The step's, with the prompt; the finished canvas may be encoded or not.
    assert moved["passes"] in (1, 2)
    assert moved["encode_rows"] in (
        usage.prompt_tokens,
        usage.prompt_tokens + server.canvas_length,
    )


def test_client_that_goes_away(server: Server) -> None:
    """A client killed in the middle of a stream leaves nothing running."""
    body = {
        "prompt": "Count: one two three",
        "max_tokens": 900,
        # So many that they still run when a busy machine has answered the next request.
        "n": 16,
        "temperature": 0.8,
        "ignore_eos": True,
        "stream": True,
    }
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={"model": MODEL, **body}, timeout=300
    ) as response:
        assert response.status_code == 200
        # Kept alive: an iterator that ends closes the connection.
        lines = response.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        assert json.loads(first.removeprefix("data: "))["choices"]
        assert server.metric("vllm:num_requests_running") >= 1
    server.wait_until_idle(30)
    server.assert_alive()


def test_live_canvas_example(server: Server) -> None:
    """The example answers its own question rightly with canvases that change from step to step."""
    done = subprocess.run(
        [sys.executable, "examples/live_canvas.py"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, "OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{server.url}/v1"},
    )
    frames = re.findall(r"^canvas (\d+), step +\d+: (.*)$", done.stdout, re.MULTILINE)
    assert len(set(frames)) >= len({block for block, _ in frames}) + 2
    answer = "lamp: LAMP, river: RIVER, stone: STONE, cloud: CLOUD"
    assert done.stdout.endswith(f"answer: {answer}\n")
