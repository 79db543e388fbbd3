"""The endpoint that replaces a draft, over an engine that only notes its calls."""

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.support.engines.tiny_pair import dflash
from tests.support.engines.vllm_configs import vllm_config
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.drafting.swap import endpoint

pytestmark = pytest.mark.engine

OLD, NEW = "/drafts/old", "/drafts/new"
# Methods of vLLM's engine; an update is noted by what it brings.
START, FINISH = "start_draft_weight_update", "finish_weight_update"
PAUSE, RESUME, FORGET = "pause_generation", "resume_generation", "init_weight_transfer_engine"
LOADED = [START, NEW, PAUSE, FINISH, RESUME]
RESTORED = [START, "restore", PAUSE, FINISH, RESUME]
DROPPED = [START, "drop", FINISH]


class Engine:
    """The engine that the endpoint calls; it notes the calls in order.

    Attributes:
        calls: Names, with what an update brings.
        failing: A call that fails once.
        paused: Whether the engine is.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing = ""
        self.paused = False
        self.vllm_config = vllm_config(
            shipped_checkpoint("qwen3"),
            speculative_config=dflash(),
            weight_transfer_config={"backend": "safetensors"},
        )
        self.vllm_config.speculative_config.model = OLD

    async def is_paused(self) -> bool:
        return self.paused

    async def update_weights(self, request: Any) -> None:
        self._note(next(iter(request.update_info.values())))

    def __getattr__(self, name: str) -> Any:
        async def noted(request: Any = None, *, mode: str = "keep") -> None:
            assert mode == "keep"
            self._note(name)

        return noted

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.failing:
            self.failing = ""
            raise RuntimeError(f"{call} failed")


class Served:
    """A server with the endpoint."""

    def __init__(self, runner: asyncio.Runner, engine: Engine, api_server_count: int) -> None:
        self.runner, self.engine = runner, engine
        app, self.swaps = FastAPI(), endpoint.DraftSwaps()
        self.swaps.attach_router(app)
        options = SimpleNamespace(api_server_count=api_server_count)
        runner.run(self.swaps.init_state(engine, app.state, options))
        transport = httpx.ASGITransport(app=app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")

    def ask(self, method: str = "GET", body: Any = None) -> httpx.Response:
        return self.runner.run(self.client.request(method, "/v1/draft", json=body))

    def swap(self, **changes: Any) -> httpx.Response:
        return self.ask("POST", {"model": NEW} | changes)

    def status(self) -> Any:
        return self.ask().json()


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    def check(folder: Any, vllm_config: Any) -> None:
        if str(folder) != NEW:
            raise ValueError(f"{folder} does not fit")

    monkeypatch.setattr(endpoint, "check_new_draft", check)
    monkeypatch.setattr(endpoint, "check_replaceable", lambda config: None)
    with asyncio.Runner() as runner:
        yield lambda engine=None, count=1: Served(runner, engine or Engine(), count)


def test_swap(serve: Any) -> None:
    """A new draft is loaded before the engine pauses, the old weights are dropped afterwards, and
    another swap may follow.
    """
    server = serve()
    assert server.status() == {"model": OLD}
    assert server.swap().json() == {"model": NEW, "replaced": OLD}
    assert server.engine.calls == LOADED + DROPPED
    assert server.status() == {"model": NEW}
    assert server.swap().json() == {"model": NEW, "replaced": NEW}


def test_refusals(serve: Any) -> None:
    """A swap that cannot be done is refused before the engine pauses, and a wrong field is
    named.
    """
    server = serve()
    refused = server.swap(model="/drafts/other")
    assert refused.status_code == 400
    assert "does not fit" in refused.text
    for changes in ({"model": 3}, {"verifications": 50}, {"draft": 1}):
        refused = server.swap(**changes)
        assert refused.status_code == 422  # vLLM's handler makes it 400.
        assert next(iter(changes)) in refused.text
    assert server.engine.calls == []
    server.engine.paused = True
    assert server.swap().status_code == 409
    server.engine.paused = False
    for failing, status in ((START, 409), (NEW, 400)):
        server.engine.failing = failing
        assert server.swap().status_code == status
    assert PAUSE not in server.engine.calls
    assert server.status() == {"model": OLD}


@pytest.mark.parametrize("failing", [PAUSE, FINISH])
def test_failed_load(failing: str, serve: Any) -> None:
    """After a load that fails, ranks that had loaded the new draft restore the old one, and the
    server goes on.
    """
    server = serve()
    server.engine.failing = failing
    assert server.swap().status_code == 500
    loaded = [call for call in LOADED if failing == FINISH or call != FINISH]
    assert server.engine.calls == [*loaded, FORGET, FINISH, *RESTORED]
    assert server.status() == {"model": OLD}
    assert server.swap().status_code == 200


@pytest.mark.parametrize(
    ("lacks", "count", "words"),
    [("weight_transfer_config", 1, "--weight-transfer-config"), ("", 2, "--api-server-count")],
)
def test_servers_that_take_none(lacks: str, count: int, words: str, serve: Any) -> None:
    """A server that cannot swap drafts names the option to change."""
    engine = Engine()
    if lacks:
        setattr(engine.vllm_config, lacks, None)
    server = serve(engine, count)
    for answer in (server.swap(), server.ask()):
        assert answer.status_code == 400
        assert words in answer.text
    assert engine.calls == []
