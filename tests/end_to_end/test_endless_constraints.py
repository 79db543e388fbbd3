"""Constraints whose compilation does not end keep neither other clients nor SIGTERM waiting."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.engines.server import (
    MODEL,
    PARSERS,
    Server,
    start_server,
    still_running,
    wait_for,
)
from tests.support.models.checkpoints import SHIPPED
from vllm_diffusion.requests.readers import GIVEN_UP

pytestmark = pytest.mark.engine

# Far longer than anything here takes, and short of a test that hangs.
WAIT_SECONDS = 120
# Shorter than what a reader may compile.
LEFT_SECONDS = 4
NUMBER = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}}


def endless(title: str) -> dict[str, Any]:
    """Return a body whose schema of 2 KB llguidance does not compile within years."""
    patterns = [f"^.*[a-{chr(97 + i % 26)}]{{2}}.{{{i}}}.*$" for i in range(40)]
    schema = {"title": title, "allOf": [{"type": "string", "pattern": text} for text in patterns]}
    return {"model": MODEL, "prompt": "x", "max_tokens": 8, "structured_outputs": {"json": schema}}


def send(server: Server, body: dict[str, Any], seconds: float) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=seconds)


def test_two_endless_constraints(tmp_path: Path) -> None:
    """While two are compiled others are answered, and then the two are; SIGTERM ends it all."""
    with start_server(SHIPPED, tmp_path / "server.log", *PARSERS) as server:
        refused = server.post("/v1/completions", endless("a client that waits"))
        assert refused.status_code == 400
        assert GIVEN_UP in refused.json()["error"]["message"]

        for i in range(2):
            send(server, endless(f"a client that leaves {i}"), seconds=1)
        body = {"prompt": "x", "max_tokens": 24, "structured_outputs": {"json": NUMBER}}
        assert server.post("/v1/completions", body).status_code == 200

        clients = [
            threading.Thread(target=send, args=(server, endless(f"a client {i}"), WAIT_SECONDS))
            for i in range(2)
        ]
        for client in clients:
            client.start()
        tool = {"type": "function", "function": {"name": "t", "parameters": NUMBER}}
        chat = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "max_tokens": 8}
        assert server.post("/v1/chat/completions", chat).status_code == 200
        processes = server.processes()
        server.process.terminate()
        assert server.process.wait(WAIT_SECONDS) == 0
        for client in clients:
            client.join(WAIT_SECONDS)
            assert not client.is_alive()
        # A reader that has just been started ends where it would read its first question.
        wait_for(lambda: still_running(processes), [], LEFT_SECONDS)
