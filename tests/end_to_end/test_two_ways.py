"""Tests of thoughts and tool calls of DiffusionGemma's ``autoregressive`` and ``linear_spec``."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.end_to_end.test_decisions import QUESTIONS, STATE, SYSTEM_ONE, letters
from tests.end_to_end.test_tools import NAMED, TOKENS, ask, gemma_request
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


def thinking(**fields: Any) -> dict[str, Any]:
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Make a JSON record: name bob, age 31."}],
        "max_tokens": 24,
        "temperature": 0.0,
        "extra_body": THINKING,
        **fields,
    }


def test_thinking(served: tuple[str, Server]) -> None:
    """Both rules serve thinking, which is parsed the same whole and streamed."""
    _, server = served
    (whole,) = server.client().chat.completions.create(**thinking()).choices
    said, thought = "", ""
    with server.client().chat.completions.create(**thinking(), stream=True) as chunks:
        for choice in (choice for chunk in chunks for choice in chunk.choices):
            said += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning", None) or ""
    assert said == (whole.message.content or "")
    assert thought == (getattr(whole.message, "reasoning", None) or "")
    assert said or thought


# Of the shipped checkpoint's generation_config.json.
ENDS = (1, 6, 14)
# However much the model wants to end its answer within a thought, and then to call.
EAGER = {str(token): 100 for token in ENDS} | {str(TOKENS["<|tool_call>"]): 90}
CALLS: dict[str, dict[str, Any]] = {
    "named after thinking": {"tool_choice": NAMED, "logit_bias": EAGER, "extra_body": THINKING},
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
    if rule == "linear_spec":
        with pytest.raises(openai.BadRequestError, match='rule .{0,2}"autoregressive'):
            ask(server, request, stream=False)
        return
    whole, streamed = (ask(server, request, stream) for stream in (False, True))
    assert whole == streamed
    _, ((called, arguments),) = whole
    assert called == "store"
    jsonschema.validate(json.loads(arguments), function["parameters"])


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
