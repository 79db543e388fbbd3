"""``vllm-diffusion chat`` against a few lines of HTTP server, under a terminal and without one."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from fcntl import ioctl
from unittest import mock

import pytest

from vllm_diffusion.cli.main import main

KEY = "a key"
# What vLLM sends behind the head of a stream that fails.
SENT_ERRORS = {"refuses in the stream": 400, "fails in the stream": 500}
ANSWER = "lamp\x1b[2J and more words than forty columns hold, all of them said"
SHOWN = ANSWER.replace("\x1b", "\N{REPLACEMENT CHARACTER}")


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers in two canvases, with frames for who asks for them."""

    requests: list[dict] = []
    behaviour = "good"
    root = "someone/tiny"

    def do_GET(self) -> None:
        if self.headers["authorization"] != f"Bearer {KEY}":
            self.reply(401, {"error": {"message": "no"}})
        else:
            card = {"id": "tiny", "object": "model", "root": self.root}
            self.reply(200, {"object": "list", "data": [card]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.requests.append(body)
        preset = (body.get("vllm_xargs") or {}).get("diffusion_preset", "fast")
        if self.behaviour == "refuses" or preset != "fast":
            self.reply(400, {"error": {"message": "diffusion_preset must be one of fast"}})
            return
        if not body.get("stream"):
            self.reply(200, {"object": "chat.completion", "choices": []})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        middle = len(ANSWER) // 2
        with contextlib.suppress(OSError):
            for block, piece in enumerate((ANSWER[:middle], ANSWER[middle:])):
                for step in (1, 2):
                    if "diffusion_frames" in (body.get("vllm_xargs") or {}):
                        kept = [i % 2 == 0 or step == 2 for i in range(len(piece))]
                        frame = {"block": block, "step": step, "total": 16, "begins_anew": False}
                        frame |= {"type": "diffusion_frame", "tokens": list(piece), "kept": kept}
                        frame |= {"text": piece, "offset": block * middle}
                        self.chunk({}, **frame)
                self.chunk({"content": piece})
                if self.behaviour in SENT_ERRORS:
                    error = {"error": {"message": "too long", "code": SENT_ERRORS[self.behaviour]}}
                    self.wfile.write(f"data: {json.dumps(error)}\n\n".encode())
                    return
                if self.behaviour == "breaks off":
                    return
                if self.behaviour == "slow":
                    time.sleep(60)
            self.chunk({}, finish="stop")
            usage = {"completion_tokens": 40, "prompt_tokens": 1, "total_tokens": 41}
            self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

    def chunk(self, delta: dict, finish: str | None = None, **shown: object) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        chunk = {"object": "chat.completion.chunk", "choices": [choice], **shown}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def reply(self, status: int, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def served() -> Iterator[tuple[str, type[Handler]]]:
    """A server's address, and its handler: what it was asked, how it behaves."""
    handler = type("OfTest", (Handler,), {"requests": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()


def chat(url: str, typed: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    """Runs the command in this process, with its input and output in files."""
    arguments, out, err = ["chat", "--url", url], io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, VLLM_API_KEY=key),
        mock.patch.object(sys, "stdin", io.StringIO(typed)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        status = main(arguments)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def test_plain(served) -> None:
    """Where there is no terminal: the answer alone on standard output, harmless, and no frames."""
    url, handler = served
    ended = chat(url, "Reverse the word pmal.\nAnd again.\n")
    assert ended.stdout == f"{SHOWN}\n{SHOWN}\n"
    assert "Talking to tiny" in ended.stderr
    first, second = handler.requests
    assert "vllm_xargs" not in first
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == SHOWN


def test_settings(served) -> None:
    """What commands set is in the next request, until they take it back."""
    url, handler = served
    typed = (
        "/preset fast\n/steps 7\n/temperature 0.5\n/seed 3\n"
        '/schema {"type": "object"}\n/image data:image/png;base64,AA==\nfirst\n'
        "/steps off\n/preset\n/reset\nsecond\n/help\n/quit\nnot read\n"
    )
    ended = chat(url, typed)
    # Each setting is asked of the server when it is typed, in a request for one token.
    tried = [request for request in handler.requests if not request.get("stream")]
    assert [request["max_tokens"] for request in tried] == [1] * 6
    first, second = (request for request in handler.requests if request.get("stream"))
    assert first["vllm_xargs"] == {"diffusion_preset": "fast", "diffusion_max_steps": 7}
    assert (first["temperature"], first["seed"]) == (0.5, 3)
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert first["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png")
    assert "vllm_xargs" not in second
    assert second["seed"] == 3
    assert second["messages"] == [{"role": "user", "content": "second"}]
    assert "quality or speed: fast\n" in ended.stderr


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
        pytest.param(
            "/schema " + '{"a":' * 20_000,
            "/schema: it must be a JSON schema, or a file that holds",
            id="too deep to read",
        ),
        ("/image nowhere.png", "/image: nowhere.png cannot be read"),
        ("/image notes.txt", "/image needs the file or the address of an image; got notes.txt."),
        ("/nonsense", "/nonsense is no command"),
    ],
)
def test_refused(typed: str, said: str, served) -> None:
    """One line, and the conversation goes on."""
    url, handler = served
    ended = chat(url, f"{typed}\nfirst\n")
    assert [said in line for line in ended.stderr.splitlines()].count(True) == 1
    assert "Traceback" not in ended.stderr
    assert "vllm_xargs" not in handler.requests[-1]
    assert ended.stdout


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("refuses", "The server refused the request: diffusion_preset must be one of fast"),
        ("refuses in the stream", "The server refused the request: too long"),
        ("fails in the stream", "The server failed in mid-answer: too long"),
        ("breaks off", "The server broke off in mid-answer"),
    ],
)
def test_failed_answers(behaviour: str, said: str, served) -> None:
    """One sentence, and the conversation goes on without what failed."""
    url, handler = served
    handler.behaviour = behaviour
    ended = chat(url, "first\nsecond\n")
    assert ended.stderr.count(said) == 2
    assert len(handler.requests[-1]["messages"]) == 1
    assert "Traceback" not in ended.stderr


def test_no_server(served) -> None:
    """A server that refuses the key, and none at all, end the command with one line."""
    url, _ = served
    assert "does not take this key" in chat(url, "", key="another").stderr
    refused = chat("http://127.0.0.1:9", "")
    assert refused.returncode == 1
    assert refused.stderr == "The server cannot be reached at 127.0.0.1:9.\n"


def terminal(url: str, *entries: tuple[bytes, bytes | signal.Signals]) -> str:
    """What a terminal of forty columns was sent, while each entry is typed once a text is there."""
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_diffusion.cli.main", "chat", "--url", url],
        env={**os.environ, "VLLM_API_KEY": KEY, "TERM": "xterm", "COLUMNS": "40"},
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    shown = b""
    for awaited, entry in entries:
        while awaited not in shown:
            shown += os.read(leader, 65536)
        if isinstance(entry, signal.Signals):
            process.send_signal(entry)
        else:
            os.write(leader, entry)
    # A terminal whose program has ended cannot be read.
    with contextlib.suppress(OSError):
        while True:
            shown += os.read(leader, 65536)
    os.close(leader)
    assert process.wait(10) == 0
    return shown.decode()


def test_terminal(served) -> None:
    """The canvas is drawn, its undecided tokens dim; at the end the answer stands there once."""
    url, handler = served
    shown = terminal(url, (b"> ", b"Reverse.\n"), (b"tokens a step", b"/quit\n"))
    assert handler.requests[0]["vllm_xargs"]["diffusion_frames"] == 1
    assert "canvas 2, step 1 of at most 16" in shown
    assert "\x1b[2m" in shown
    assert "\x1b[2J" not in shown
    # What is drawn last, without what moves the cursor and sets a style, is the answer.
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\0", shown)
    last = drawn[drawn.rindex("lamp") :].partition("4 steps on 2 canvases")[0]
    assert " ".join(last.replace("\0", "").split()) == SHOWN
    assert "10.0 tokens a step" in shown


def test_interrupt(served) -> None:
    """Ctrl-C stops the answer and not the program."""
    url, handler = served
    handler.behaviour = "slow"
    stop = (b"lamp", signal.SIGINT)
    shown = terminal(url, (b"> ", b"Reverse.\n"), stop, (b"Stopped", b"/quit\n"))
    assert "Traceback" not in shown
