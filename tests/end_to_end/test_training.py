"""What a trainer asks of a live server: new weights, pauses, sleep; and that others cannot ask it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import SHIPPED, copy_checkpoint
from tests.support.server import Server, start_server

pytestmark = pytest.mark.engine

OPTIONS = ("--weight-transfer-config", '{"backend": "safetensors"}', "--enable-sleep-mode")
LONG = 600
NAME = "model.decoder.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    "path",
    ["/sleep", "/wake_up", "/pause", "/resume", "/update_weights", "/collective_rpc"]
    + ["/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"],
)
def test_not_for_everybody(server: Server, path: str) -> None:
    """A server that nobody started in vLLM's developers' mode has none of it."""
    assert server.post(path, {}).status_code == 404


def changed(seed: int) -> dict[str, Tensor]:
    """The shipped weights, changed."""
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
        # Text to its end: nothing but padding would follow the end of an answer, whatever the weights.
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


class Weights:
    """Kinds of weights, as a source of vLLM's weight transfer."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

        class Source(WeightSource):
            @cached_property
            def metadata(self) -> list[ParamMeta]:
                return [ParamMeta(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()]

            def iter_full(self) -> Iterator[tuple[str, Tensor]]:
                yield from tensors.items()

        self.source = Source()

    def send(self, server: Server, folder: Path, **options: Any) -> None:
        """By vLLM's own factory of trainers and its own client."""
        from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        from vllm_diffusion import plugin
        from vllm_diffusion.weights.trainer_engine import SafetensorsTrainerInitInfo

        plugin.register()
        engine = WeightTransferTrainerFactory.trainer_init(
            SafetensorsTrainerInitInfo(rank=0, folder=str(folder), **options),
            client=HTTPVLLMWeightSyncClient(server.url),
            source=self.source,
        )
        engine.send_weights()
        assert not list(folder.iterdir())


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """Answers of servers that were started on the weights."""
    folder = tmp_path_factory.mktemp("fresh")
    found = {}
    for name, weights in (("shipped", changed(0)), ("changed", changed(1))):
        checkpoint = copy_checkpoint(folder / name)
        if name == "changed":
            save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
        with start_server(checkpoint, folder / f"{name}.log") as running:
            found[name] = answers(running)
    return found


@pytest.fixture(scope="module", params=["", "tensor", "data"], ids=lambda kind: kind or "plain")
def live(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with start_server(
        SHIPPED,
        tmp_path_factory.mktemp("live") / "server.log",
        *OPTIONS,
        *((f"--{request.param}-parallel-size", "2") if request.param else ()),
        VLLM_SERVER_DEV_MODE="1",
    ) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestLive:
    """In order: every test leaves the shipped weights."""

    def restore(self, live: Server) -> None:
        command(live, "/pause?mode=abort")
        command(live, "/start_weight_update")
        command(live, "/update_weights", update_info={"path": str(SHIPPED)})
        command(live, "/finish_weight_update")
        command(live, "/resume")

    def test_updates(self, live: Server, fresh: dict[str, Any], tmp_path: Path) -> None:
        """Whole and a tensor at a time, and back: tokens are those of fresh servers."""
        assert answers(live) == fresh["shipped"]
        for options in ({}, {"max_file_bytes": 1}):
            command(live, "/pause?mode=wait")
            Weights(changed(1)).send(live, tmp_path, **options)
            command(live, "/resume")
            assert answers(live) == fresh["changed"] != fresh["shipped"]
            self.restore(live)
            assert answers(live) == fresh["shipped"]

    def in_flight(self, live: Server) -> tuple[Future[list[int]], ThreadPoolExecutor]:
        """A request whose first tokens are there."""
        pool = ThreadPoolExecutor(1)
        before = live.metric("vllm:generation_tokens_total")
        asked = pool.submit(tokens, live, "Once", 5, LONG)
        while live.metric("vllm:generation_tokens_total") == before:
            time.sleep(0.05)
        return asked, pool

    def test_bad_updates(self, live: Server, tmp_path: Path) -> None:
        """A sentence that names the tensor; a request in flight, and those after it, are unharmed."""
        expected = tokens(live, "Once", 5, LONG)
        weights = changed(1)
        path = tmp_path / "update.safetensors"
        save_file(weights | {NAME: weights[NAME][:-1]}, path)
        damaged = tmp_path / "damaged.safetensors"
        damaged.write_bytes(path.read_bytes()[:-9])
        asked, pool = self.in_flight(live)
        for update_info, words in (
            ({"path": str(path)}, (NAME, "[255, 128]", "[256, 128]")),
            # vLLM takes paths out of what it tells a client.
            ({"path": str(damaged)}, ("truncated",)),
            ({"path": str(tmp_path / "none")}, ("not there",)),
            ({"path": 3}, ("update_info.path",)),
            ({"tensors": []}, ("tensors",)),
        ):
            command(live, "/start_weight_update")
            response = httpx.post(
                f"{live.url}/update_weights", json={"update_info": update_info}, timeout=300
            )
            assert response.status_code >= 400
            assert not [word for word in words if word not in response.text], response.text
        assert not asked.done()
        assert asked.result() == expected
        pool.shutdown()
        assert tokens(live, "Once", 5, LONG) == expected

    def test_pauses(self, live: Server, tmp_path: Path) -> None:
        """Kept requests go on with what they had, awaited ones end first, aborted ones end at once."""
        old = tokens(live, "Once", 5, LONG)
        asked, pool = self.in_flight(live)
        command(live, "/pause?mode=keep")
        done = live.metric("vllm:generation_tokens_total")
        time.sleep(1)
        assert live.metric("vllm:generation_tokens_total") == done
        assert httpx.get(f"{live.url}/is_paused").json() == {"is_paused": True}
        Weights(changed(1)).send(live, tmp_path)
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

    def test_sleep(self, live: Server, fresh: dict[str, Any], tmp_path: Path) -> None:
        """Workers hold less while it sleeps; it wakes as it was, or with the weights it is given."""

        def held() -> int:
            processes = psutil.Process(live.process.pid).children(recursive=True)
            return sum(process.memory_info().rss for process in processes)

        # Fill some of the cache.
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda seed: tokens(live, f"{seed} " * 99, seed, LONG), range(8)))
        before = held()
        command(live, "/sleep?level=1")
        assert before - held() > 2 * 2**20
        assert httpx.get(f"{live.url}/is_sleeping").json() == {"is_sleeping": True}
        assert command(live, "/wake_up").json()["status"] == "awake"
        assert answers(live) == fresh["shipped"]

        command(live, "/sleep?level=2")
        assert command(live, "/wake_up?tags=weights").json()["status"] == "sleeping"
        Weights(changed(1)).send(live, tmp_path)
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
@pytest.mark.timeout(3600)
def test_reinforcement() -> None:
    """The example raises its reward; after each update a fresh server says the same tokens."""
    example = Path(__file__).resolve().parents[2] / "examples" / "rl" / "grpo.py"
    done = subprocess.run(
        [sys.executable, str(example), "--verify"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rounds = [
        {name: float(value) for name, value in re.findall(r"(\w+) ([\d.e+-]+)", line)}
        for line in done.stdout.splitlines()
    ]
    assert len(rounds) > 10
    # An answer is as short as it may be in the end: a token.
    assert all(one["compared"] >= 16 for one in rounds[1:])
    assert rounds[-1]["held_out"] > rounds[0]["held_out"] + 0.2
