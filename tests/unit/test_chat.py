"""``vllm-diffusion chat`` against a few lines of HTTP server, under a terminal and without one."""

from __future__ import annotations

import contextlib
import http.server
import io
import json
import os
import pty
import re
import select
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
    ended = subprocess.run(
        [sys.executable, "-m", "vllm_diffusion.cli.main", "chat", "--url", url],
        input="Reverse the word pmal.\nAnd again.\n",
        env={**os.environ, "VLLM_API_KEY": KEY},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = ANSWER.replace("\x1b", "\N{REPLACEMENT CHARACTER}")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{said}\n{said}\n"
    assert "Talking to tiny" in ended.stderr
    first, second = handler.requests
    assert "vllm_xargs" not in first
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "user"]
    assert second["messages"][1]["content"] == said


def test_commands(served) -> None:
    """What they set is in the next request; what cannot be set is said, and nothing is lost."""
    url, handler = served
    typed = (
        "/preset fast\n/steps 7\n/temperature 0.5\n/seed 3\n"
        '/schema {"type": "object"}\n/image data:image/png;base64,AA==\nfirst\n'
        "/steps off\n/preset\n/preset slow\n/steps many\n/steps 0\n/temperature hot\n/temperature 99\n"
        "/temperature nan\n/schema nowhere.json\n/schema {\n"
        "/image nowhere.png\n/image notes.txt\n/nonsense\n/reset\nsecond\n/help\n/quit\nnot read\n"
    )
    ended = chat(url, typed)
    assert ended.returncode == 0, ended.stderr
    # Each setting is asked of the server when it is typed, in a request for one token.
    tried = [request for request in handler.requests if not request.get("stream")]
    assert [request["max_tokens"] for request in tried] == [1] * 7
    first, second = (request for request in handler.requests if request.get("stream"))
    assert first["vllm_xargs"] == {"diffusion_preset": "fast", "diffusion_max_steps": 7}
    assert (first["temperature"], first["seed"]) == (0.5, 3)
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert first["messages"][0]["content"][0]["image_url"]["url"].startswith("data:image/png")
    assert "vllm_xargs" not in second
    assert second["seed"] == 3
    assert second["messages"] == [{"role": "user", "content": "second"}]
    for said in (
        "/preset: The server refused the request: diffusion_preset must be one of fast",
        "/steps: 'many' must be an integer of at least 1.",
        "/steps: '0' must be an integer of at least 1.",
        "/temperature: 'hot' must be a number from 0 to 2.",
        "/temperature: '99' must be a number from 0 to 2.",
        "/temperature: 'nan' must be a number from 0 to 2.",
        "/schema: it must be a JSON schema, or a file that holds one: [Errno 2] No such file",
        "/schema: it must be a JSON schema, or a file that holds one: Expecting property name",
        "/image: nowhere.png cannot be read",
        "/image needs the file or the address of an image; got notes.txt.",
        "/nonsense is no command",
        'schema: {"type": "object"}\n',
        "quality or speed: fast\n",
        "/temperature X",
    ):
        assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_goes_wrong(served) -> None:
    """One sentence, and the conversation goes on without what failed."""
    url, handler = served
    assert "does not take this key" in chat(url, "", key="another").stderr
    refused = chat("http://127.0.0.1:9", "")
    assert refused.returncode == 1
    assert refused.stderr == "The server cannot be reached at 127.0.0.1:9.\n"
    handler.behaviour = "refuses"
    ended = chat(url, "first\n")
    assert "The server refused the request: diffusion_preset must be one of fast" in ended.stderr
    handler.behaviour = "refuses in the stream"
    assert "The server refused the request: too long\n" in chat(url, "first\n").stderr
    handler.behaviour = "fails in the stream"
    assert "The server failed in mid-answer: too long\n" in chat(url, "first\n").stderr
    handler.behaviour = "breaks off"
    ended = chat(url, "first\nsecond\n")
    assert ended.stderr.count("The server broke off in mid-answer") == 2
    assert len(handler.requests[-1]["messages"]) == 1
    assert "Traceback" not in ended.stderr


def terminal(url: str, columns: int, typed: list[bytes | signal.Signals], term: str) -> str:
    """What a terminal was sent, while something is typed after each prompt of the conversation."""
    leader, follower = pty.openpty()
    ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_diffusion.cli.main", "chat", "--url", url],
        env={**os.environ, "VLLM_API_KEY": KEY, "TERM": term, "COLUMNS": str(columns)},
        stdin=follower,
        stdout=follower,
        stderr=follower,
        start_new_session=True,
    )
    os.close(follower)
    shown, prompts, waiting = b"", 0, list(typed)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.1)[0]:
            try:
                shown += os.read(leader, 65536)
            except OSError:
                break
        is_next = shown.count(b"> ") > prompts
        if waiting and isinstance(waiting[0], signal.Signals):
            is_next = b"lamp" in shown
        if waiting and is_next:
            prompts = shown.count(b"> ")
            entry = waiting.pop(0)
            if isinstance(entry, signal.Signals):
                process.send_signal(entry)
            else:
                os.write(leader, entry)
    process.wait(10)
    os.close(leader)
    return shown.decode()


@pytest.mark.parametrize("columns", [40, 200])
def test_terminal(served, columns: int) -> None:
    """The canvas is drawn, its undecided tokens dim; at the end the answer stands there once."""
    url, handler = served
    shown = terminal(url, columns, [b"Reverse.\n", b"/quit\n"], "xterm")
    assert handler.requests[0]["vllm_xargs"]["diffusion_frames"] == 1
    assert "canvas 2, step 1 of at most 16" in shown
    assert "\x1b[2m" in shown
    assert "\x1b[2J" not in shown
    # What is drawn last, without what moves the cursor and sets a style, is the answer.
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\0", shown)
    last = drawn[drawn.rindex("lamp") :].partition("4 steps on 2 canvases")[0]
    words = (
        "lamp\N{REPLACEMENT CHARACTER}[2J and more words than forty columns hold, all of them said"
    )
    assert " ".join(last.replace("\0", "").split()) == words
    assert "10.0 tokens a step" in shown


def test_interrupt(served) -> None:
    """Ctrl-C stops the answer and not the program."""
    url, handler = served
    handler.behaviour = "slow"
    shown = terminal(url, 80, [b"Reverse.\n", signal.SIGINT, b"/quit\n"], "xterm")
    assert "Stopped" in shown
    assert "Traceback" not in shown
