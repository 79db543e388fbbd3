"""With the middleware only health and metrics are served without the key."""

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

pytestmark = pytest.mark.engine

KEY = {"Authorization": "Bearer the key"}


def client(*options: str) -> TestClient:
    """Return a client of a server that answers every path, behind what vLLM adds by its options."""
    from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

    from tests.robustness.serve_options import serve_parser

    answer = Route("/{path:path}", lambda _: PlainTextResponse("answer"), methods=["GET", "POST"])
    app = Starlette(routes=[answer])
    name = "vllm_diffusion.requests.require_key.RequireKey"
    arguments = serve_parser().parse_args(["a/model", "--middleware", name, *options])
    init_entrypoints_middleware(arguments, app, ("generate",))
    return TestClient(app)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


GUARDED = ("/v1/completions", "/invocations", "/tokenize", "/generative_scoring", "/docs", "/")


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        # Every path, guarded by vLLM or not.
        *((path, {}, 401) for path in (*GUARDED, "//health")),
        *((path, bearer("another"), 401) for path in GUARDED),
        *((path, KEY, 200) for path in GUARDED),
        # The header of Anthropic's clients.
        ("/v1/messages", {"x-api-key": "the key"}, 200),
        ("/v1/messages", {"X-API-Key": "another"}, 401),
        ("/v1/messages", {"x-api-key": ""}, 401),
        ("/v1/messages", {"x-api-key": "Bearer the key"}, 401),
        ("/v1/messages", {"x-api-key": "\u00e9".encode()}, 401),
        ("/v1/messages", bearer("none") | {"x-api-key": "the key"}, 200),
        ("/v1/messages", KEY | {"x-api-key": "another"}, 200),
        # What load balancers and Prometheus request.
        *((path, {}, 200) for path in ("/health", "/ping", "/metrics")),
    ],
)
def test_guarded(
    path: str, headers: dict[str, Any], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every path needs the right key, as a bearer token or in x-api-key, except those that load
    balancers and Prometheus request.
    """
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    assert client().post(path, headers=headers).status_code == status


def test_several_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key of --api-key is taken, and then not that of the environment, as vLLM does it."""
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    server = client("--api-key", "one", "two")
    for path in ("/v1/completions", "/tokenize"):
        for key in ("one", "two"):
            assert server.post(path, headers=bearer(key)).text == "answer"
        assert server.post(path, headers=KEY).status_code == 401
    assert server.post("/tokenize", headers={"x-api-key": "two"}).text == "answer"
    assert server.post("/tokenize", headers={"x-api-key": "the key"}).status_code == 401


def test_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The middleware refuses to start without a key."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="VLLM_API_KEY"):
        client().get("/health")
