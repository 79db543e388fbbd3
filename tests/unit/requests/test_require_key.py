"""With the middleware only health and metrics are served without the key."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/invocations",
        "/tokenize",
        "/generative_scoring",
        "/docs",
        "/",
        "//health",
    ],
)
def test_guarded(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path, guarded by vLLM or not, needs the right key."""
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    assert client().post(path).status_code == 401
    assert client().post(path, headers={"Authorization": "Bearer another"}).status_code == 401
    assert client().post(path, headers=KEY).text == "answer"


def test_several_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key of --api-key is taken, and then not that of the environment, as vLLM does it."""
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    server = client("--api-key", "one", "two")
    for path in ("/v1/completions", "/tokenize"):
        for key in ("one", "two"):
            assert server.post(path, headers={"Authorization": f"Bearer {key}"}).text == "answer"
        assert server.post(path, headers=KEY).status_code == 401
    assert server.post("/tokenize", headers={"x-api-key": "two"}).text == "answer"
    assert server.post("/tokenize", headers={"x-api-key": "the key"}).status_code == 401


def test_key_of_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of Anthropic's clients in x-api-key counts as well as the bearer token."""
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    post = client().post
    assert post("/v1/messages", headers={"x-api-key": "the key"}).text == "answer"
    assert post("/v1/messages", headers={"X-API-Key": "another"}).status_code == 401
    assert post("/v1/messages", headers={"x-api-key": ""}).status_code == 401
    assert post("/v1/messages", headers={"x-api-key": "Bearer the key"}).status_code == 401
    assert post("/v1/messages", headers={"x-api-key": "\u00e9".encode()}).status_code == 401
    both = {"Authorization": "Bearer none", "x-api-key": "the key"}
    assert post("/v1/messages", headers=both).text == "answer"
    assert post("/v1/messages", headers=KEY | {"x-api-key": "another"}).text == "answer"


@pytest.mark.parametrize("path", ["/health", "/ping", "/metrics"])
def test_open(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths that load balancers and Prometheus request need no key."""
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    assert client().get(path).text == "answer"


def test_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The middleware refuses to start without a key."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="VLLM_API_KEY"):
        client().get("/health")
