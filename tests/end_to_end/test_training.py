"""Tests of a trainer with a live server: new weights, pauses, sleep, and access to them."""

import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.engines.commands import run
from tests.support.engines.server import Server, start_server
from tests.support.models.checkpoints import SHIPPED, copy_checkpoint

pytestmark = pytest.mark.engine

LONG = 600
NAME = "model.decoder.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "path",
    ["/sleep", "/wake_up", "/pause", "/resume", "/update_weights", "/collective_rpc"]
    + ["/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"],
)
def test_not_for_everybody(server: Server, path: str) -> None:
    """A server outside vLLM's developers' mode has no path for trainers."""
    assert server.post(path, {}).status_code == 404


def changed(seed: int) -> dict[str, Tensor]:
    """Return the shipped weights with a change."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor * (1 + 0.1 * torch.randn(tensor.shape, generator=generator))
        if tensor.dim() > 1
        else tensor
        for name, tensor in load_file(SHIPPED / "model.safetensors").items()
    }


def tokens(
    server: Server, prompt: str = "What is", seed: int = 1, num_tokens: int = 70
) -> list[int]:
    body = {
        "prompt": prompt,
        "seed": seed,
        "max_tokens": num_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        # Text to its end: nothing but padding would follow the end of an answer, whatever the
        # weights.
        "allowed_token_ids": list(range(40, 250)),
        "return_token_ids": True,
    }
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "length"
    found: list[int] = choice["token_ids"]
    return found


def answers(server: Server) -> list[list[int]]:
    return [
        tokens(server, prompt, seed) for seed, prompt in enumerate(("What is", "Add 1 and", "x"))
    ]


def command(server: Server, path: str, **body: Any) -> httpx.Response:
    response = httpx.post(f"{server.url}{path}", json=body or None, timeout=300)
    assert response.status_code == 200, response.text
    return response


def reload(server: Server, folder: Path) -> httpx.Response:
    """Make every worker read a folder."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    return httpx.post(f"{server.url}/collective_rpc", json=body, timeout=300)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of other weights."""
    checkpoint = copy_checkpoint(tmp_path_factory.mktemp("other") / "checkpoint")
    save_file(changed(1), checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


@pytest.fixture(scope="module", params=["", "tensor", "data"], ids=lambda kind: kind or "plain")
def layout(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return options of the server's ranks; by the order of their sums a token may differ."""
    return (f"--{request.param}-parallel-size", "2") if request.param else ()


@pytest.fixture(scope="module")
def fresh(
    layout: tuple[str, ...], other: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[int]]]:
    """Return answers of servers that were started on the weights."""
    folder = tmp_path_factory.mktemp("fresh")
    found = {}
    for name, checkpoint in (("shipped", SHIPPED), ("changed", other)):
        with start_server(checkpoint, folder / f"{name}.log", *layout) as running:
            found[name] = answers(running)
    return found


@pytest.fixture(scope="module")
def live(layout: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("live") / "server.log"
    options = ("--enable-sleep-mode", *layout)
    with start_server(SHIPPED, log, *options, VLLM_SERVER_DEV_MODE="1") as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestLive:
    """Tests in order, each of which leaves the shipped weights."""

    def restore(self, live: Server) -> None:
        command(live, "/pause?mode=abort")
        assert reload(live, SHIPPED).status_code == 200
        command(live, "/resume")

    def test_reload(self, live: Server, fresh: dict[str, Any], other: Path) -> None:
        """After reloads there and back, tokens are those of fresh servers."""
        assert answers(live) == fresh["shipped"]
        command(live, "/pause?mode=wait")
        assert reload(live, other).status_code == 200
        command(live, "/resume")
        assert answers(live) == fresh["changed"] != fresh["shipped"]
        self.restore(live)
        assert answers(live) == fresh["shipped"]

    def in_flight(self, live: Server) -> tuple[Future[list[int]], ThreadPoolExecutor]:
        """Return a request whose first tokens are there."""
        pool = ThreadPoolExecutor(1)
        before = live.metric("vllm:generation_tokens_total")
        asked = pool.submit(tokens, live, "Once", 5, LONG)
        while live.metric("vllm:generation_tokens_total") == before:
            time.sleep(0.05)
        return asked, pool

    def test_pauses(self, live: Server, other: Path) -> None:
        """Kept requests resume, awaited ones end first, and aborted ones end at once."""
        old = tokens(live, "Once", 5, LONG)
        asked, pool = self.in_flight(live)
        command(live, "/pause?mode=keep")
        done = live.metric("vllm:generation_tokens_total")
        time.sleep(1)
        assert live.metric("vllm:generation_tokens_total") == done
        assert httpx.get(f"{live.url}/is_paused").json() == {"is_paused": True}
        assert reload(live, other).status_code == 200
        command(live, "/resume")
        kept = asked.result()
        assert len(kept) == LONG
        canvas = live.canvas_length
        assert kept[:canvas] == old[:canvas]
        assert kept != old
        self.restore(live)

        asked, _ = self.in_flight(live)
        command(live, "/pause?mode=wait")
        assert asked.result(timeout=1) == old
        command(live, "/resume")

        asked, _ = self.in_flight(live)
        command(live, "/pause?mode=abort")
        with pytest.raises(AssertionError, match="abort"):
            asked.result(timeout=60)
        command(live, "/resume")
        assert tokens(live, "Once", 5, LONG) == old
        pool.shutdown()

    def test_sleep(self, live: Server, fresh: dict[str, Any], other: Path) -> None:
        """A sleeping server uses less memory, and wakes with its old weights or given ones."""
        # Fill some of the cache.
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda seed: tokens(live, f"{seed} " * 99, seed, LONG), range(8)))
        before = live.resident_bytes()
        command(live, "/sleep?level=1")
        assert before - live.resident_bytes() > 2 * 2**20
        assert httpx.get(f"{live.url}/is_sleeping").json() == {"is_sleeping": True}
        assert command(live, "/wake_up").json()["status"] == "awake"
        assert answers(live) == fresh["shipped"]

        command(live, "/sleep?level=2")
        assert command(live, "/wake_up?tags=weights").json()["status"] == "sleeping"
        assert reload(live, other).status_code == 200
        assert command(live, "/wake_up?tags=kv_cache").json()["status"] == "awake"
        assert answers(live) == fresh["changed"]
        self.restore(live)

        # A request that is kept while the memory of its cache is given away.
        old = tokens(live, "Once", 5, LONG)
        asked, pool = self.in_flight(live)
        command(live, "/sleep?level=1&mode=keep")
        command(live, "/wake_up")
        assert asked.result() == old
        pool.shutdown()
        command(live, "/pause?mode=wait")
        command(live, "/release_kv_cache_memory")
        command(live, "/wake_up")
        command(live, "/resume")
        assert answers(live) == fresh["shipped"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_reinforcement(tmp_path: Path) -> None:
    """The example raises its reward by updating its server's weights."""
    example = Path(__file__).resolve().parents[2] / "examples" / "rl" / "grpo.py"
    done = run(sys.executable, example, "--out", tmp_path)
    rewards = [float(value) for value in re.findall(r"reward ([\d.]+)", done.stdout)]
    assert len(rewards) == 12 == len(list(tmp_path.iterdir()))
    # Without new weights in the server it would stay where it begins.
    assert rewards[-1] > rewards[0] + 0.2
