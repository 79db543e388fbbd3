"""The endpoint of a draft that another one replaces, over an engine that only notes what it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.unit.drafting.test_accepted import PLACES, step

pytestmark = pytest.mark.engine

OLD, NEW = "/drafts/old", "/drafts/new"
GOOD, BAD = [5, 6, 7, 4, 6], [0, 1, 0, 0, 2]


class Engine:
    """What the endpoint asks of vLLM's, noted in order.

    Attributes:
        calls: Names, with what an update brings.
        failing: A call that fails once.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing = ""
        self.paused = False
        self.logger_manager = SimpleNamespace(stat_loggers=[])
        self.vllm_config = SimpleNamespace(
            speculative_config=SimpleNamespace(model=OLD),
            weight_transfer_config=SimpleNamespace(backend="safetensors"),
        )

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self.failing:
            self.failing = ""
            raise RuntimeError(f"{call} failed")

    async def is_paused(self) -> bool:
        return self.paused

    async def start_draft_weight_update(self) -> None:
        self._note("start")

    async def update_weights(self, request: Any) -> None:
        self._note(next(iter(request.update_info.values())))

    async def finish_weight_update(self) -> None:
        self._note("finish")

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self._note("forget")

    async def pause_generation(self, mode: str) -> None:
        assert mode == "keep"
        self._note("pause")

    async def resume_generation(self) -> None:
        self._note("resume")

    def verify(self, accepted: list[int]) -> None:
        """A step, as vLLM tells its loggers of it."""
        (logger,) = self.logger_manager.stat_loggers
        logger.record(SimpleNamespace(spec_decoding_stats=step(PLACES, accepted)), None)


Test = Callable[[Engine, httpx.AsyncClient], Awaitable[None]]


def served(
    test: Test, monkeypatch: pytest.MonkeyPatch, engine: Engine, api_server_count: int = 1
) -> None:
    from fastapi import FastAPI

    from vllm_diffusion.drafting.swap import endpoint as draft_endpoint

    def check(folder: Any, vllm_config: Any) -> None:
        if str(folder) != NEW:
            raise ValueError(f"{folder} does not fit")

    monkeypatch.setattr(draft_endpoint, "check_new_draft", check)
    monkeypatch.setattr(draft_endpoint, "check_replaceable", lambda config: None)

    async def run() -> None:
        app, plugin = FastAPI(), draft_endpoint.DraftSwaps()
        plugin.attach_router(app)
        await plugin.init_state(
            engine, app.state, SimpleNamespace(api_server_count=api_server_count)
        )
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await test(engine, client)

    asyncio.run(run())


async def swap(client: httpx.AsyncClient, **changes: Any) -> Any:
    return await client.post("/v1/draft", json={"model": NEW, "verifications": 50, **changes})


async def judged(client: httpx.AsyncClient) -> Any:
    while True:
        status = (await client.get("/v1/draft")).json()
        if status["swap"]["state"] != "pending":
            return status
        await asyncio.sleep(0)


LOADED = ["start", NEW, "pause", "finish", "resume"]


@pytest.mark.parametrize(
    ("before", "after", "state", "rest"),
    [
        (GOOD, BAD, "rolled back", ["start", "restore", "pause", "finish", "resume"]),
        (BAD, GOOD, "kept", ["start", "drop", "finish"]),
        (GOOD, GOOD, "kept", ["start", "drop", "finish"]),
        ([], BAD, "kept", ["start", "drop", "finish"]),
    ],
)
def test_judgement(
    before: list[int],
    after: list[int],
    state: str,
    rest: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After as many verifications as were asked for, by the latest of the old draft; a second may follow."""

    async def test(engine: Engine, client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/draft")).json() == {"model": OLD, "swap": None}
        for _ in range(40):
            # What is older than the latest is not looked at.
            engine.verify(GOOD if before == BAD else BAD)
        for _ in range(10 * bool(before)):
            engine.verify(before)
        if not before:
            for one in engine.logger_manager.stat_loggers:
                one._swaps._latest.clear()
        status = (await swap(client)).json()
        assert status["model"] == NEW
        assert engine.calls == LOADED
        assert status["swap"]["before"]["verifications"] == 5 * 10 * bool(before)
        for _ in range(9):
            engine.verify(after)
        assert (await client.get("/v1/draft")).json()["swap"]["state"] == "pending"
        assert (await swap(client)).status_code == 409
        engine.verify(after)
        status = await judged(client)
        assert engine.calls == LOADED + rest
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
        engine.verify(GOOD)
        status = (await swap(client, verifications=30)).json()
        assert status["swap"]["replaced"] == (OLD if state == "rolled back" else NEW)
        assert status["swap"]["before"]["verifications"] >= 30

    served(test, monkeypatch, Engine())


def test_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody asks anything, nothing is judged: a way out."""

    async def test(engine: Engine, client: httpx.AsyncClient) -> None:
        assert (await client.delete("/v1/draft")).status_code == 409
        await swap(client)
        engine.calls.clear()
        status = (await client.delete("/v1/draft")).json()
        assert status["model"] == OLD
        assert (status["swap"]["state"], status["swap"]["reason"]) == ("rolled back", "asked for")
        assert engine.calls == ["start", "restore", "pause", "finish", "resume"]
        assert (await client.delete("/v1/draft")).status_code == 409

    served(test, monkeypatch, Engine())


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything stands still, and with the field's name."""

    async def test(engine: Engine, client: httpx.AsyncClient) -> None:
        refused = await swap(client, model="/drafts/other")
        assert refused.status_code == 400
        assert "does not fit" in refused.text
        for changes in ({"model": 3}, {"verifications": 29}, {"verifications": "50"}, {"draft": 1}):
            refused = await swap(client, **changes)
            assert refused.status_code == 422  # vLLM's handler makes it 400.
            assert next(iter(changes)) in refused.text
        assert engine.calls == []
        engine.paused = True
        assert (await swap(client)).status_code == 409
        engine.paused = False
        engine.failing = "start"
        assert (await swap(client)).status_code == 409
        engine.failing = NEW
        assert (await swap(client)).status_code == 400
        assert "pause" not in engine.calls
        assert (await client.get("/v1/draft")).json() == {"model": OLD, "swap": None}

    served(test, monkeypatch, Engine())


@pytest.mark.parametrize("failing", ["pause", "finish"])
def test_failed_load(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that had loaded it put the old one back, and the server goes on."""

    async def test(engine: Engine, client: httpx.AsyncClient) -> None:
        engine.failing = failing
        assert (await swap(client)).status_code == 500
        loaded = [call for call in LOADED if failing == "finish" or call != "finish"]
        restored = ["start", "restore", "pause", "finish", "resume"]
        assert engine.calls == [*loaded, "forget", "finish", *restored]
        assert (await client.get("/v1/draft")).json() == {"model": OLD, "swap": None}
        assert (await swap(client)).status_code == 200

    served(test, monkeypatch, Engine())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_transfer_config": None}, "--weight-transfer-config"),
        ({"logger_manager": None}, "--disable-log-stats"),
        ({"api_server_count": 2}, "--api-server-count"),
    ],
)
def test_servers_that_take_none(
    changes: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each says which option to change."""

    async def test(engine: Engine, client: httpx.AsyncClient) -> None:
        for answer in (
            await swap(client),
            await client.get("/v1/draft"),
            await client.delete("/v1/draft"),
        ):
            assert answer.status_code == 400
            assert words in answer.text
        assert engine.calls == []

    engine = Engine()
    if "logger_manager" in changes:
        engine.logger_manager = None
    if "weight_transfer_config" in changes:
        engine.vllm_config.weight_transfer_config = None
    served(test, monkeypatch, engine, changes.get("api_server_count", 1))
