"""Tests of the probe of ``examples/kubernetes`` with a stand-in for a server."""

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ALIVE = Path(__file__).resolve().parents[2] / "examples/kubernetes/alive.py"


@contextmanager
def stand_in(*, answers: int | None, passes: Iterator[int]) -> Iterator[str]:
    """Serve a counter of passes, and a status for requests; ``None`` leaves them waiting."""
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = f'vllm_diffusion:passes_total{{engine="0",model_name="a b"}} {next(passes)}.0\n'
            self._send(200, "# TYPE vllm_diffusion:passes_total counter\n" + text)

        def do_POST(self) -> None:
            if answers is None:
                ended.wait(60)
            elif self.headers["Authorization"] != "Bearer the key":
                self._send(401, "Unauthorized")
            else:
                self._send(answers, "{}")

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()


def probe(url: str, key: str = "the key") -> tuple[int, str]:
    """Return the exit status of the probe and its output."""
    # A proxy that nobody is: it must not be asked.
    variables = {"VLLM_API_KEY": key, "http_proxy": "http://127.0.0.1:9"}
    command = [sys.executable, str(ALIVE), "--url", url, "--seconds", "3"]
    ended = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


@pytest.mark.parametrize(
    ("answers", "passes", "status"),
    [
        (200, itertools.repeat(5), 0),
        (None, itertools.count(5), 0),
        (503, itertools.count(5), 0),
        (None, itertools.repeat(5), 1),
        (500, itertools.repeat(5), 1),
    ],
    ids=["idle", "busy", "full queue", "stands still", "broken"],
)
def test_probe(answers: int | None, passes: Iterator[int], status: int) -> None:
    """The probe succeeds if the engine answers or computes, and else fails in time."""
    with stand_in(answers=answers, passes=passes) as url:
        assert probe(url)[0] == status


def test_probe_says_why() -> None:
    """The probe's output names a wrong key, and a server that is not there."""
    with stand_in(answers=200, passes=itertools.repeat(5)) as url:
        status, text = probe(url, key="another")
        assert (status, "401" in text) == (1, True)
    status, text = probe(url)
    assert (status, "/metrics" in text) == (1, True)
