"""``vllm-diffusion swap-draft`` against a server that answers by a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.commands import status_of
from vllm_diffusion.drafting.commands import swap_draft


def status(state: str) -> dict[str, Any]:
    figures = {"verifications": 50, "tokens_per_verification": 3.14159, "standard_error": 0.1}
    swap = {"model": "/new", "replaced": "/old", "state": state, "reason": "why"}
    return {"model": "/old", "swap": {**swap, "before": figures, "after": {"verifications": 0}}}


class Script:
    """Answers of a server, one after the other, and what it was asked."""

    def __init__(self) -> None:
        self.answers: list[tuple[int, Any]] = []
        self.asked: list[Any] = []

    def __call__(self, url: str, *, method: str, body: Any, api_key: Any, timeout: float) -> Any:
        self.asked.append((method, url, api_key, body))
        code, content = self.answers.pop(0)
        return httpx.Response(code, json=content, request=httpx.Request(method, url))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    made = Script()
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.setattr(swap_draft, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(swap_draft, "ask", made)
    return made


def run(*arguments: str, url: str = "http://a/") -> int:
    return status_of("swap-draft", "--url", url, *arguments)


def test_swap(
    script: Script,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An absolute path is sent, with the key; what became of it is the exit status."""
    monkeypatch.chdir(tmp_path)
    script.answers = [(200, status("pending")), (200, status("pending")), (200, status("kept"))]
    assert run("new", "--verifications", "50", "--wait", "--api-key", "k") == 0
    body = {"model": str(tmp_path / "new"), "verifications": 50}
    assert script.asked[0] == ("POST", "http://a/v1/draft", "k", body)
    assert [asked[0] for asked in script.asked[1:]] == ["GET", "GET"]
    assert capsys.readouterr().out.splitlines() == [
        "draft   /old",
        "swap    kept: why",
        "before  /old: 3.14 tokens a verification, standard error 0.10, 50 verifications",
        "after   /new: no verifications",
    ]
    script.answers = [(200, status("pending")), (200, status("rolled back"))]
    assert run("new", "--wait") == 1
    script.answers = [(200, status("pending"))]
    assert run("new") == 0


def test_status_and_roll_back(script: Script, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a draft it only asks."""
    rolled_back = (200, status("rolled back"))
    script.answers = [(200, {"model": "/old", "swap": None}), rolled_back, rolled_back]
    assert run() == 0
    assert capsys.readouterr().out == "draft   /old\n"
    assert run() == 0
    # It did what it is for.
    assert run("--roll-back") == 0
    assert [asked[0] for asked in script.asked] == ["GET", "GET", "DELETE"]
    assert run("new", "--roll-back") == 2
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
    code: int, content: Any, words: str, script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sentence, and no trace."""
    script.answers = [(code, content)]
    assert run("new") == 1
    assert words in capsys.readouterr().err


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("new", url="http://127.0.0.1:9") == 1
    assert "http://127.0.0.1:9/v1/draft does not answer" in capsys.readouterr().err
