"""``vllm-diffusion swap-draft`` against a server that answers by a script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.commands import status_of
from vllm_diffusion.drafting.commands import swap_draft


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
    """An absolute path is sent, with the key; without a draft the server is only asked."""
    monkeypatch.chdir(tmp_path)
    script.answers = [(200, {"model": "/new", "replaced": "/old"}), (200, {"model": "/new"})]
    assert run("new", "--api-key", "k") == 0
    assert script.asked == [("POST", "http://a/v1/draft", "k", {"model": str(tmp_path / "new")})]
    assert capsys.readouterr().out == "draft   /new\nbefore  /old\n"
    assert run() == 0
    assert script.asked[1][0] == "GET"
    assert capsys.readouterr().out == "/new\n"


@pytest.mark.parametrize(
    ("code", "content", "words"),
    [
        (400, {"error": {"message": "num_layers=3 does not fit"}}, "num_layers=3 does not fit"),
        (409, {"error": {"message": "another is loaded"}}, "another is loaded"),
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
