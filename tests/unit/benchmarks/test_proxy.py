"""The proxy of the examples, whose two servers tests/end_to_end/test_disaggregated.py runs."""

from __future__ import annotations

import runpy
from pathlib import Path

import httpx
from starlette.testclient import TestClient

PROXY = Path(__file__).resolve().parents[3] / "examples" / "disaggregated" / "proxy.py"


def test_its_client_is_closed(monkeypatch):
    """When the application stops; until then one client asks both servers."""
    asked: list[tuple[str, bytes]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append((str(request.url), request.content))
        return httpx.Response(200, stream=httpx.ByteStream(b"no JSON"))

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: client)
    proxy = runpy.run_path(str(PROXY))["proxy"]
    with TestClient(proxy("http://prefill", "http://denoise")) as both:
        assert both.post("/v1/completions", json={"prompt": "a", "stream": True}).status_code == 200
        assert both.post("/v1/completions", content=b"{").text == "no JSON"
        assert not client.is_closed
    assert client.is_closed
    assert asked == [
        (
            "http://prefill/v1/completions",
            b'{"prompt":"a","max_tokens":1,"kv_transfer_params":{"do_remote_decode":true}}',
        ),
        (
            "http://denoise/v1/completions",
            b'{"prompt": "a", "stream": true, "kv_transfer_params": null}',
        ),
        ("http://denoise/v1/completions", b"{"),
    ]
