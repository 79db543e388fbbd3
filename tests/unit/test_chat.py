"""Tests of ``vllm-diffusion chat`` without a terminal.

``end_to_end`` runs it in a terminal and with a real server.
"""

import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx
import openai
import pytest

from vllm_diffusion.cli import chat
from vllm_diffusion.cli.answer import Answer, LiveDisplay, PlainDisplay
from vllm_diffusion.cli.client import openai_client
from vllm_diffusion.cli.main import main

# What vLLM sends after the head of a stream that fails.
SENT_ERRORS = {"refuses in the stream": 400, "fails in the stream": 500}
WAYS = ("entropy_bound", "linear_spec", "autoregressive")
ANSWER = "lamp\x1b[2J and more words"
SHOWN = ANSWER.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
USAGE = {"completion_tokens": 40, "prompt_tokens": 1, "total_tokens": 41}


@dataclass
class Served:
    """Answers of a server with one preset, and the requests that it got."""

    behaviour: str = "good"
    requests: list[dict[str, Any]] = field(default_factory=list)

    def client(self) -> openai.OpenAI:
        http = httpx.Client(transport=httpx.MockTransport(self.answer))
        return openai.OpenAI(base_url="http://a/v1", api_key="k", max_retries=0, http_client=http)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if self.behaviour == "has another key":
            return httpx.Response(401, json={"error": {"message": "no"}})
        if request.method == "GET":
            return httpx.Response(200, json={"object": "list", "data": [{"id": "tiny"}]})
        body = json.loads(request.content)
        self.requests.append(body)
        own = body.get("vllm_xargs", {})
        if self.behaviour == "has no choices" and own:
            return httpx.Response(400, json={"error": {"message": "It is not known."}})
        if self.behaviour == "refuses" or own.get("diffusion_preset", "fast") != "fast":
            error = {"message": "diffusion_preset must be one of fast"}
            return httpx.Response(400, json={"error": error})
        if own.get("diffusion_rule", WAYS[0]) not in WAYS:
            error = {"message": f"diffusion_rule must be one of {', '.join(WAYS)}; got 'x'."}
            return httpx.Response(400, json={"error": error})
        if not body.get("stream"):
            return httpx.Response(200, json={"object": "chat.completion", "choices": []})
        events = [{"choices": [{"index": 0, "delta": {"content": ANSWER}}]}]
        if code := SENT_ERRORS.get(self.behaviour):
            events.append({"error": {"message": "too long", "code": code}})
        elif self.behaviour != "breaks off":
            events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            events.append({"choices": [], "usage": USAGE})
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, text=text)


Talk = Callable[..., tuple[str, str]]


@pytest.fixture
def served() -> Served:
    return Served()


@pytest.fixture
def talk(served: Served, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Return a function that runs the command on typed lines and returns output and errors."""
    monkeypatch.setattr(chat, "openai_client", lambda *_: served.client())

    def run(typed: str, status: int = 0) -> tuple[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            assert main(["chat", "--url", "http://a"]) == status
        assert "Traceback" not in err.getvalue()
        return out.getvalue(), err.getvalue()

    return run


def test_plain(served: Served, talk: Talk) -> None:
    """Standard output has the escaped answer alone, without frames, and turns add up."""
    out, err = talk("Reverse the word pmal.\nAnd again.\n")
    assert out == f"{SHOWN}\n{SHOWN}\n"
    assert "Talking to tiny" in err
    first, second = served.requests
    assert "vllm_xargs" not in first
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == SHOWN


def test_help_of_a_server_without_choices(served: Served, talk: Talk) -> None:
    """The help of a model without presets and ways states that it has none."""
    served.behaviour = "has no choices"
    _, err = talk("/help\n")
    assert "quality or speed: not on this server\n" in err
    assert "how tokens are made: not on this server\n" in err


def test_settings(served: Served, talk: Talk) -> None:
    """What a command sets is in the following requests until it is reset."""
    _, err = talk(
        "/system Be brief.\n/way linear_spec\n/preset fast\n/steps 7\n/temperature 0.5\n/seed 3\n"
        '/schema {"type": "object"}\n/image data:image/png;base64,AA==\nfirst\n'
        "/system off\n/way off\n/steps off\n/preset\n/reset\nsecond\n/help\n/quit\nnot read\n"
    )
    # Each setting is tried at the server when it is typed, in a request for one token.
    tried = [request for request in served.requests if not request.get("stream")]
    assert [request["max_tokens"] for request in tried] == [1] * 9
    first, second = (request for request in served.requests if request.get("stream"))
    own = {"diffusion_rule": "linear_spec", "diffusion_preset": "fast", "diffusion_max_steps": 7}
    assert first["vllm_xargs"] == own
    assert (first["temperature"], first["seed"]) == (0.5, 3)
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert first["messages"][0] == {"role": "system", "content": "Be brief."}
    assert first["messages"][1]["content"][0]["image_url"]["url"].startswith("data:image/png")
    assert "vllm_xargs" not in second
    assert second["seed"] == 3
    assert second["messages"] == [{"role": "user", "content": "second"}]
    assert "quality or speed: fast\n" in err
    assert "how tokens are made: entropy_bound, linear_spec, autoregressive\n" in err


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("/st", ["/steps"]),
        ("/s", ["/system", "/steps", "/seed", "/schema"]),
        ("/preset ", ["fast"]),
        ("/way a", ["autoregressive"]),
        ("/way", ["/way"]),
        ("/steps ", []),
        ("a /st", []),
        ("hello", []),
    ],
)
def test_completions(line: str, names: list[str], served: Served) -> None:
    """Commands are completed at the start of a line, with the server's ways and presets."""
    found = chat.Conversation(served.client(), "tiny", 8, plain=True).completions(line)
    assert sorted(found) == sorted(names)


def test_canvas_of_a_way(served: Served, talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames are requested in a terminal, except from a way that does not denoise."""
    drawn: list[bool] = []
    monkeypatch.setattr(
        chat, "display_for", lambda out, plain: drawn.append(not plain) or PlainDisplay(out)
    )
    talk("first\n/way linear_spec\nsecond\n/way autoregressive\nthird\n")
    assert drawn == [True, True, False]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (
            "/preset slow",
            "/preset: The server refused the request: diffusion_preset must be one of fast",
        ),
        ("/steps 0", "/steps: '0' must be an integer of at least 1."),
        ("/temperature nan", "/temperature: 'nan' must be a number from 0 to 2."),
        ("/schema nowhere.json", "/schema: it must be a JSON schema, or a file that holds one: "),
        # Too deep to read.
        ("/schema " + '{"a":' * 20_000, "/schema: it must be a JSON schema, or a file that holds"),
        ("/image nowhere.png", "/image: nowhere.png cannot be read"),
        ("/image notes.txt", "/image needs the file or the address of an image; got notes.txt."),
        ("/nonsense", "/nonsense is not a command"),
    ],
    ids=lambda text: text[:20],
)
def test_refused(typed: str, said: str, served: Served, talk: Talk) -> None:
    """An invalid command prints one line, and the conversation goes on."""
    out, err = talk(f"{typed}\nfirst\n")
    assert [said in line for line in err.splitlines()].count(True) == 1
    assert "vllm_xargs" not in served.requests[-1]
    assert out


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("refuses", "The server refused the request: diffusion_preset must be one of fast"),
        ("refuses in the stream", "The server refused the request: too long"),
        ("fails in the stream", "The server failed in mid-answer: too long"),
        ("breaks off", "The server broke off in mid-answer"),
    ],
)
def test_failed_answers(behaviour: str, said: str, served: Served, talk: Talk) -> None:
    """A failed answer prints one sentence, and the conversation goes on without it."""
    served.behaviour = behaviour
    _, err = talk("first\nsecond\n")
    assert err.count(said) == 2
    assert len(served.requests[-1]["messages"]) == 1


def test_canvas_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control characters of the model move no cursor, decided or not."""
    # Drawn as in a terminal.
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = io.StringIO()
    frame = SimpleNamespace(block=0, step=1, total=16, begins_anew=False, offset=0)
    frame.tokens, frame.kept = ["\x1b[2J", "x", "\x1b[3J"], [False, True, True]
    frame.text = "".join(frame.tokens)
    with LiveDisplay(out) as display:
        display.frame(frame, Answer())
    assert "[2J" in out.getvalue()
    assert not {"\x1b[2J", "\x1b[3J"} & {*re.findall(r"\x1b\[\dJ", out.getvalue())}


def test_no_server(served: Served, talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong key or a missing server ends the command with one line."""
    served.behaviour = "has another key"
    assert "does not take this key" in talk("", status=1)[1]
    with mock.patch.object(chat, "openai_client", openai_client):
        assert main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err == "The server cannot be reached at 127.0.0.1:9.\n"
