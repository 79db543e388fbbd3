"""``vllm-diffusion swap-draft`` with one answer of a server."""

from typing import Any
from unittest import mock

import httpx
import pytest

from tests.support.engines.commands import status_of
from vllm_diffusion.drafting.commands import swap_draft

COMMAND = ("swap-draft", "--url", "http://a/", "--api-key", "k")


def response(code: int, content: Any) -> httpx.Response:
    return httpx.Response(code, json=content, request=httpx.Request("GET", "http://a"))


def test_swap(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The command sends a draft's absolute path with the key; without a draft it only requests the
    status.
    """
    monkeypatch.chdir(tmp_path)
    ask = mock.Mock(return_value=response(200, {"model": "/new", "replaced": "/old"}))
    monkeypatch.setattr(swap_draft, "ask", ask)
    assert status_of(*COMMAND, "new") == 0
    sent = {"method": "POST", "api_key": "k", "body": {"model": str(tmp_path / "new")}}
    ask.assert_called_with("http://a/v1/draft", timeout=mock.ANY, **sent)
    assert status_of(*COMMAND) == 0
    assert ask.call_args.kwargs["method"] == "GET"
    assert capsys.readouterr().out == "draft   /new\nbefore  /old\n/new\n"


@pytest.mark.parametrize(
    ("code", "content", "words"),
    [
        (409, {"error": {"message": "another is loaded"}}, "another is loaded"),
        (404, {"detail": "Not Found"}, "VLLM_PLUGINS naming vllm_diffusion_draft"),
        (401, {"error": "Unauthorized"}, "--api-key"),
        (502, ["what is this"], "Bad Gateway"),
    ],
)
def test_refusals(code: int, content: Any, words: str, monkeypatch, capsys) -> None:
    """The command prints a refused swap in one sentence without a traceback."""
    monkeypatch.setattr(swap_draft, "ask", lambda *_, **__: response(code, content))
    assert status_of(*COMMAND, "new") == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert words in captured.err
