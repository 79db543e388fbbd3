"""Tests of thoughts and tool calls of DiffusionGemma's ``autoregressive`` and ``linear_spec``."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.end_to_end.test_decisions import QUESTIONS, STATE, SYSTEM_ONE, letters
from tests.end_to_end.test_tools import RECORD, TOKENS
from tests.pairs.answers import Answer, ask
from tests.pairs.fields import CHAT
from tests.support.engines.server import MODEL, PARSERS, Server, start_server
from tests.support.models.checkpoints import SHIPPED

pytestmark = [pytest.mark.engine, pytest.mark.slow]

THINKING = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module", params=["autoregressive", "linear_spec"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    """Return the rule, and a server with it."""
    log = tmp_path_factory.mktemp(request.param) / "server.log"
    settings = json.dumps({"diffusion": {"rule": request.param}})
    with start_server(SHIPPED, log, *PARSERS, "--additional-config", settings) as running:
        yield request.param, running


def both_forms(server: Server, body: dict[str, Any]) -> Answer:
    """Return the answer to a chat, which is the same whole and streamed."""
    with httpx.Client(base_url=server.url, timeout=300) as client:
        whole, streamed = (
            ask(client, CHAT, {"model": MODEL, "stream": stream, **body})
            for stream in (False, True)
        )
    assert whole.told == streamed.told
    return whole


def test_thinking(served: tuple[str, Server]) -> None:
    """Both rules serve thinking, which is parsed the same whole and streamed."""
    _, server = served
    messages = [{"role": "user", "content": "Make a JSON record: name bob, age 31."}]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0.0, **THINKING}
    (choice,) = both_forms(server, body).choices
    assert choice.text or choice.thought


def gemma_request(**fields: Any) -> dict[str, Any]:
    """Return a request for a record with a part that Gemma's parser has no types for."""
    place = {
        "type": "object",
        "properties": {"at": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
        "required": ["at"],
    }
    parameters = {
        **RECORD,
        "properties": {
            **RECORD["properties"],
            "place": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
        },
        "required": ["name", "age", "place"],
        "$defs": {"place": place},
    }
    return {
        "messages": [{"role": "user", "content": "Make a JSON record: name bob, age 31."}],
        "max_tokens": 256,
        "seed": 1,
        "tools": [{"type": "function", "function": {"name": "store", "parameters": parameters}}],
        **fields,
    }


NAMED = {"type": "function", "function": {"name": "store"}}


# Of the shipped checkpoint's generation_config.json.
ENDS = (1, 6, 14)
# However much the model wants to end its answer within a thought, and then to call.
EAGER = {str(token): 100 for token in ENDS} | {str(TOKENS["<|tool_call>"]): 90}
CALLS: dict[str, dict[str, Any]] = {
    "named after thinking": {"tool_choice": NAMED, "logit_bias": EAGER, **THINKING},
    # The model begins the call by itself, as one that was trained on calls would.
    "auto": {
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "logit_bias": {TOKENS["<|tool_call>"]: 100},
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(served: tuple[str, Server], name: str) -> None:
    """A grammar makes a call follow its schema; drafts have none and name the rule that has."""
    rule, server = served
    request = gemma_request(**CALLS[name])
    function = request["tools"][0]["function"]
    function["strict"] = True
    answer = both_forms(server, request)
    if rule == "linear_spec":
        assert answer.status == 400
        assert 'rule "autoregressive' in answer.message
        return
    (choice,) = answer.choices
    (call,) = choice.calls
    assert call["name"] == "store"
    jsonschema.validate(json.loads(call["arguments"]), function["parameters"])


@pytest.mark.parametrize("path", ["/v1/decisions", "/v1/systemone"])
def test_decisions(served: tuple[str, Server], path: str) -> None:
    """Decisions are read from the next token without canvases; ``joint`` and drafts are refused."""
    rule, server = served
    bodies = {
        "/v1/decisions": {"input": "The sky is blue.", "questions": QUESTIONS},
        "/v1/systemone": {"state": STATE, "questions": {**SYSTEM_ONE, "letters": letters(26)}},
    }
    response = server.post(path, bodies[path])
    joint = server.post(path, {**bodies[path], "joint": True})
    assert joint.status_code == 400, joint.text
    if rule == "linear_spec":
        assert response.status_code == 400
        return
    assert response.status_code == 200, response.text
    assert "joint" in joint.json()["error"]["message"]
    answers = response.json()["answers"]
    if path == "/v1/decisions":
        for answer in answers[1:]:
            likely = [item["probability"] for item in answer["probabilities"]]
            assert sum(likely) == pytest.approx(1.0)
        return
    for name, answer in answers.items():
        assert sum(answer["probabilities"].values()) == pytest.approx(1.0)
        assert 0.0 < response.json()["diagnostics"][name]["label_mass"] <= 1.0 + 1e-5
