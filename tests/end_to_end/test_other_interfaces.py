"""Tests of stored responses and of Anthropic's messages, besides OpenAI's completions."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.pairs.answers import events
from tests.support.engines.commands import run
from tests.support.engines.server import MODEL, Server
from tests.support.models.checkpoints import SHIPPED

pytestmark = pytest.mark.engine

QUESTIONS = ("What is 7+8?", "What is 2+3?")
CHAT = {"messages": [{"role": "user", "content": QUESTIONS[0]}]}


@pytest.fixture(autouse=True)
def _idle(server: Server) -> Iterator[None]:
    yield
    server.wait_until_idle()


def test_stored_conversation(server: Server) -> None:
    """A response to a stored one answers as the whole conversation sent again."""
    client = server.client()
    options: dict[str, Any] = {"model": MODEL, "temperature": 0.0, "max_output_tokens": 60}
    first = client.responses.create(input=QUESTIONS[0], store=True, **options)
    assert first.output_text == "15"
    assert client.responses.retrieve(first.id).output_text == "15"
    second = client.responses.create(
        input=QUESTIONS[1], previous_response_id=first.id, store=True, **options
    )
    conversation = [
        {"role": "user", "content": QUESTIONS[0]},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": QUESTIONS[1]},
    ]
    whole = client.responses.create(input=conversation, store=False, **options)
    assert second.output_text == whole.output_text == "5"
    assert second.usage.input_tokens == whole.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="x", previous_response_id="resp_none", **options)


def _message(server: Server, **fields: Any) -> dict[str, Any]:
    body = {**CHAT, "max_tokens": 1100, "temperature": 0.0, **fields}
    response = server.post("/v1/messages", body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize(
    "thinking",
    [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}],
    ids=lambda thinking: thinking["type"],
)
def test_anthropic_thinking(thinking: dict[str, Any], server: Server) -> None:
    """Thinking can be turned on with or without a budget, and is a block before the answer."""
    message = _message(server, thinking=thinking)
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][0]["thinking"].strip() == "Task: sums."
    assert message["content"][1]["text"].strip() == "15"
    assert message["stop_reason"] == "end_turn"
    for off in (
        {"thinking": {"type": "disabled"}},
        {},
        # The client's options of the template are used.
        {"thinking": thinking, "chat_template_kwargs": {"enable_thinking": False}},
    ):
        without = _message(server, **off)
        assert [block["type"] for block in without["content"]] == ["text"]


def test_anthropic_tokens_of_a_thinking_prompt(server: Server) -> None:
    """The tokens of a thinking prompt are counted as those of a chat that thinks."""
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    counted = server.post("/v1/messages/count_tokens", CHAT | thinking).json()["input_tokens"]
    chat = {"max_tokens": 1, "chat_template_kwargs": {"enable_thinking": True}}
    answer = server.post("/v1/chat/completions", CHAT | chat).json()
    assert counted == answer["usage"]["prompt_tokens"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_batch_file(tmp_path: Path, server: Server) -> None:
    """``vllm run-batch`` gives a server's answers, and a refused line does not harm others."""
    plain = {**CHAT, "max_tokens": 40, "seed": 3}
    bodies = {
        "plain": plain,
        "frames": {**plain, "diffusing": True},
        "setting": {**plain, "vllm_xargs": {"diffusion_max_steps": "x"}},
        "again": {**plain, "temperature": 1.0},
    }
    asked, answered = tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
    with asked.open("w") as file:
        for name, body in bodies.items():
            line = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions"}
            print(json.dumps(line | {"body": {**body, "model": MODEL}}), file=file)
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "run-batch"]
    command += ["-i", asked, "-o", answered, "--model", SHIPPED]
    command += ["--served-model-name", MODEL, "--max-model-len", "512", "--max-num-seqs", "8"]
    run(*command)
    lines = [json.loads(line) for line in answered.read_text().splitlines()]
    found = {line["custom_id"]: line for line in lines}
    refused = {name: line["error"] for name, line in found.items() if line["error"]}
    assert refused.keys() == {"frames", "setting"}
    assert "set stream to true" in refused["frames"]["error"]["message"]
    assert refused["setting"]["error"]["param"] == "diffusion_max_steps"
    for name in ("plain", "again"):
        alone = server.post("/v1/chat/completions", bodies[name]).json()
        (choice,) = found[name]["response"]["body"]["choices"]
        assert choice["message"]["content"] == alone["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "asked", "counted"),
    [
        ("/v1/chat/completions", CHAT | {"max_tokens": 40}, "completion_tokens_details"),
        ("/v1/completions", {"prompt": QUESTIONS[0], "max_tokens": 8}, "completion_tokens_details"),
        (
            "/v1/responses",
            {"input": QUESTIONS[0], "max_output_tokens": 40},
            "output_tokens_details",
        ),
    ],
)
def test_counts_of_predictions(path: str, asked: Any, counted: str, server: Server) -> None:
    """Chats, completions and responses count a prediction in their usage, streamed and not, and
    nothing without one. A greedy canvas begins with random tokens too: a seed makes it the same.
    """
    body = {"model": MODEL, "temperature": 0, "seed": 3, **asked}
    plain = server.post(path, body).json()["usage"].get(counted)
    assert plain is None or plain.get("accepted_prediction_tokens") is None
    body["prediction"] = {"type": "content", "content": "pmal"}
    details = server.post(path, body).json()["usage"][counted]
    streamed = body | {"stream": True}
    if path != "/v1/responses":
        streamed["stream_options"] = {"include_usage": True}
    last = events(server.post(path, streamed).text)[-1]
    assert last.get("response", last)["usage"][counted] == details
    counts = [details[f"{name}_prediction_tokens"] for name in ("accepted", "rejected")]
    assert min(counts) >= 0
    assert 0 < sum(counts) <= 4
