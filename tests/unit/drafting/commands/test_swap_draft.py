"""``vllm-diffusion swap-draft`` against a server that answers by a script."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import status_of
from vllm_diffusion.drafting.commands import swap_draft


def status(state: str) -> dict[str, Any]:
    figures = {"verifications": 50, "tokens_per_verification": 3.14159, "standard_error": 0.1}
    swap = {"model": "/new", "replaced": "/old", "state": state, "reason": "why"}
    return {"model": "/old", "swap": {**swap, "before": figures, "after": {"verifications": 0}}}


class Script(BaseHTTPRequestHandler):
    answers: list[tuple[int, Any]] = []
    asked: list[Any] = []

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        key = self.headers.get("Authorization")
        self.asked.append((self.command, self.path, key, json.loads(body) if body else None))
        code, content = self.answers.pop(0)
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(swap_draft, "_POLL_SECONDS", 0.01)
    Script.asked, Script.answers = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Script)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


def run(url: str, *arguments: str) -> int:
    return status_of("swap-draft", "--url", url, *arguments)


def test_swap(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An absolute path is sent, with the key; what became of it is the exit status."""
    monkeypatch.chdir(tmp_path)
    Script.answers = [(200, status("pending")), (200, status("pending")), (200, status("kept"))]
    assert run(url, "new", "--verifications", "50", "--wait", "--api-key", "k") == 0
    body = {"model": str(tmp_path / "new"), "verifications": 50}
    assert Script.asked[0] == ("POST", "/v1/draft", "Bearer k", body)
    assert [asked[0] for asked in Script.asked[1:]] == ["GET", "GET"]
    assert capsys.readouterr().out.splitlines() == [
        "draft   /old",
        "swap    kept: why",
        "before  /old: 3.14 tokens a verification, standard error 0.10, 50 verifications",
        "after   /new: no verifications",
    ]
    Script.answers = [(200, status("pending")), (200, status("rolled back"))]
    assert run(url, "new", "--wait") == 1
    Script.answers = [(200, status("pending"))]
    assert run(url, "new") == 0


def test_status_and_roll_back(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a draft it only asks."""
    rolled_back = (200, status("rolled back"))
    Script.answers = [(200, {"model": "/old", "swap": None}), rolled_back, rolled_back]
    assert run(url) == 0
    assert capsys.readouterr().out == "draft   /old\n"
    assert run(url) == 0
    # It did what it is for.
    assert run(url, "--roll-back") == 0
    assert [asked[0] for asked in Script.asked] == ["GET", "GET", "DELETE"]
    assert run(url, "new", "--roll-back") == 2
    assert "takes no draft" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "content", "words"),
    [
        (400, {"error": {"message": "num_layers=3 does not fit"}}, "num_layers=3 does not fit"),
        (409, {"error": {"message": "a swap is pending"}}, "a swap is pending"),
        (404, {"detail": "Not Found"}, "VLLM_PLUGINS naming vllm_diffusion_draft"),
        (401, {"error": "Unauthorized"}, "--api-key"),
        (502, ["what is this"], "Bad Gateway"),
    ],
)
def test_refusals(
    code: int, content: Any, words: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence, and no trace."""
    Script.answers = [(code, content)]
    assert run(url, "new") == 1
    assert words in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("http://127.0.0.1:9", "new") == 1
    assert "http://127.0.0.1:9/v1/draft does not answer" in capsys.readouterr().err
