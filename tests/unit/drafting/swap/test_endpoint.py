"""The endpoint of a draft that another one replaces, over an engine that only notes what it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.unit.drafting.test_accepted import PLACES, step
from vllm_diffusion.drafting.swap import endpoint

pytestmark = pytest.mark.engine

OLD, NEW = "/drafts/old", "/drafts/new"
GOOD, BAD = [5, 6, 7, 4, 6], [0, 1, 0, 0, 2]
# Methods of vLLM's engine; an update is noted by what it brings.
START, FINISH = "start_draft_weight_update", "finish_weight_update"
PAUSE, RESUME, FORGET = "pause_generation", "resume_generation", "init_weight_transfer_engine"
LOADED = [START, NEW, PAUSE, FINISH, RESUME]
RESTORED = [START, "restore", PAUSE, FINISH, RESUME]
KEPT = [START, "drop", FINISH]


class Engine:
    """What the endpoint asks of vLLM's, noted in order.

    Attributes:
        calls: Names, with what an update brings.
        failing: A call that fails once.
        paused: Whether the engine is.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing = ""
        self.paused = False
        self.logger_manager: Any = SimpleNamespace(stat_loggers=[])
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(model=OLD),
            weight_transfer_config=SimpleNamespace(backend="safetensors"),
        )

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
        return self.ask("POST", {"model": NEW, "verifications": 50} | changes)

    def status(self) -> Any:
        return self.ask().json()

    def verify(self, accepted: list[int], times: int = 1) -> None:
        """Steps, as vLLM reports them to its loggers."""
        (logger,) = self.engine.logger_manager.stat_loggers
        stats = SimpleNamespace(spec_decoding_stats=step(PLACES, accepted))

        async def steps() -> None:
            for _ in range(times):
                logger.record(stats, None)

        self.runner.run(steps())

    def judged(self) -> Any:
        while (status := self.status())["swap"]["state"] == "pending":
            pass
        return status


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Served]]:
    def check(folder: Any, vllm_config: Any) -> None:
        if str(folder) != NEW:
            raise ValueError(f"{folder} does not fit")

    monkeypatch.setattr(endpoint, "check_new_draft", check)
    monkeypatch.setattr(endpoint, "check_replaceable", lambda config: None)
    with asyncio.Runner() as runner:
        yield lambda engine=None, count=1: Served(runner, engine or Engine(), count)


@pytest.mark.parametrize(
    ("before", "after", "state", "rest"),
    [
        (GOOD, BAD, "rolled back", RESTORED),
        (BAD, GOOD, "kept", KEPT),
        (GOOD, GOOD, "kept", KEPT),
        ([], BAD, "kept", KEPT),
    ],
)
def test_judgement(
    before: list[int], after: list[int], state: str, rest: list[str], serve: Any
) -> None:
    """After as many verifications as were asked for, by the latest of the old draft; a second may follow."""
    server = serve()
    assert server.status() == {"model": OLD, "swap": None}
    if before:
        # What is older than the latest is not looked at.
        server.verify(GOOD if before == BAD else BAD, times=40)
        server.verify(before, times=10)
    status = server.swap().json()
    assert status["model"] == NEW
    assert server.engine.calls == LOADED
    assert status["swap"]["before"]["verifications"] == 5 * 10 * bool(before)
    server.verify(after, times=9)
    assert server.status()["swap"]["state"] == "pending"
    assert server.swap().status_code == 409
    server.verify(after)
    status = server.judged()
    assert server.engine.calls == LOADED + rest
    found = status["swap"]
    assert found["state"] == state
    assert status["model"] == (OLD if state == "rolled back" else NEW)
    assert found["after"]["verifications"] == 50
    if before:
        # 10 times these five, of which so many are longer than each place.
        for name, lengths in (("before", before), ("after", after)):
            assert found[name]["accepted_by_position"] == [
                10 * sum(n > place for n in lengths) for place in range(PLACES)
            ]
            assert found[name]["tokens_per_verification"] == 1 + sum(lengths) / 5
    else:
        assert "nothing to compare with" in found["reason"]
    # The next one is compared with what serves now.
    server.verify(GOOD)
    status = server.swap(verifications=30).json()
    assert status["swap"]["replaced"] == (OLD if state == "rolled back" else NEW)
    assert status["swap"]["before"]["verifications"] >= 30


def test_put_back(serve: Any) -> None:
    """Where nobody asks anything, nothing is judged: a way out."""
    server = serve()
    assert server.ask("DELETE").status_code == 409
    server.swap()
    server.engine.calls.clear()
    status = server.ask("DELETE").json()
    assert status["model"] == OLD
    assert (status["swap"]["state"], status["swap"]["reason"]) == ("rolled back", "asked for")
    assert server.engine.calls == RESTORED
    assert server.ask("DELETE").status_code == 409


def test_refusals(serve: Any) -> None:
    """Before anything stands still, and with the field's name."""
    server = serve()
    refused = server.swap(model="/drafts/other")
    assert refused.status_code == 400
    assert "does not fit" in refused.text
    for changes in ({"model": 3}, {"verifications": 29}, {"verifications": "50"}, {"draft": 1}):
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
    assert server.status() == {"model": OLD, "swap": None}


@pytest.mark.parametrize("failing", [PAUSE, FINISH])
def test_failed_load(failing: str, serve: Any) -> None:
    """Ranks that had loaded it put the old one back, and the server goes on."""
    server = serve()
    server.engine.failing = failing
    assert server.swap().status_code == 500
    loaded = [call for call in LOADED if failing == FINISH or call != FINISH]
    assert server.engine.calls == [*loaded, FORGET, FINISH, *RESTORED]
    assert server.status() == {"model": OLD, "swap": None}
    assert server.swap().status_code == 200


@pytest.mark.parametrize(
    ("lacks", "count", "words"),
    [
        ("weight_transfer_config", 1, "--weight-transfer-config"),
        ("logger_manager", 1, "--disable-log-stats"),
        ("", 2, "--api-server-count"),
    ],
)
def test_servers_that_take_none(lacks: str, count: int, words: str, serve: Any) -> None:
    """Each says which option to change."""
    engine = Engine()
    for part in (engine, engine.vllm_config):
        if lacks in vars(part):
            setattr(part, lacks, None)
    server = serve(engine, count)
    for answer in (server.swap(), server.ask(), server.ask("DELETE")):
        assert answer.status_code == 400
        assert words in answer.text
    assert engine.calls == []
