"""Two servers behind a balancer, one of them killed every minute, while adapters come and go.

python -m tests.robustness.replicas --minutes 20

A small supervisor starts a dead one again. Clients send seeded requests, to the checkpoint and to its
adapters, and go to the other server where one is gone. Exits with 1 where an answer has other tokens
than a server gives that nobody troubles, where a request hangs, or where a server grows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.support.adapters import DECODER, ENCODER, adapt
from tests.support.checkpoints import SHIPPED
from tests.support.seeded_requests import REQUESTS, Tokens, seeded_request, tokens_of
from tests.support.server import MODEL, Server, start_server, stop_server

NUM_CLIENTS = 4
# Longer than an answer takes on two busy cores beside a server that starts.
ANSWER_SECONDS = 180.0
# Of all processes of a server, from its first minute of work to its end.
GROWTH_BYTES = 160 * 1024**2
OPTIONS = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--max-num-seqs", "4")


class Replica:
    """A server that is started again whenever it is gone."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.num_starts = 0
        self.server: Server | None = None
        self._folder = folder
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._supervise)
        self._thread.start()

    def _supervise(self) -> None:
        while not self._is_over.wait(0.2):
            if self.server is not None and self.server.process.poll() is None:
                continue
            self.server = None
            self.num_starts += 1
            log = self._folder / f"{self.name}-{self.num_starts}.log"
            self.server = start_server(SHIPPED, log, *OPTIONS, VLLM_ALLOW_RUNTIME_LORA_UPDATING="1")

    def kill(self) -> None:
        """As a machine that loses its power: every process of it at once."""
        if (server := self.server) is not None:
            self.server = None
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        if self.server is not None:
            stop_server(self.server)


class Balancer:
    """Sends a request to the servers in turn, and on to the next one where one fails."""

    def __init__(self, replicas: list[Replica], adapters: dict[str, Path]) -> None:
        self.counts: Counter[str] = Counter()
        self._adapters = adapters
        self._turns = itertools.cycle(replicas)
        self._lock = threading.Lock()

    def answer(self, model: str, index: int) -> Tokens:
        """One of the seeded requests.

        Raises:
            TimeoutError: If nobody has answered it in time.
        """
        path, body = seeded_request(index)
        deadline = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                server = next(self._turns).server
            if server is None:
                time.sleep(0.1)
                continue
            try:
                response = httpx.post(
                    f"{server.url}{path}",
                    json={**body, "model": model},
                    timeout=deadline - time.monotonic() + 1,
                )
            except httpx.ReadTimeout:
                break
            except httpx.TransportError:
                self.counts["lost with their server"] += 1
                continue
            if response.status_code == 404 and model in self._adapters:
                self.load(server, model)
            elif response.status_code >= 500:
                self.counts["refused by a dying server"] += 1
            else:
                self.counts[f"answered by {'an adapter' if model != MODEL else 'the model'}"] += 1
                return tokens_of(response)
        raise TimeoutError(f"request {index} to {model} hangs")

    def load(self, server: Server, model: str) -> None:
        """An adapter comes."""
        fields = {"lora_name": model, "lora_path": str(self._adapters[model])}
        self._tell(server, "load", fields)

    def unload(self, server: Server, model: str) -> None:
        """An adapter goes."""
        self._tell(server, "unload", {"lora_name": model})

    def _tell(self, server: Server, verb: str, fields: dict[str, str]) -> None:
        try:
            httpx.post(f"{server.url}/v1/{verb}_lora_adapter", json=fields, timeout=ANSWER_SECONDS)
        except httpx.TransportError:
            return
        self.counts[f"adapters {verb}ed"] += 1


@contextmanager
def _replicas(folder: Path) -> Iterator[list[Replica]]:
    started = [Replica(folder, name) for name in ("first", "second")]
    try:
        while not all(replica.server for replica in started):
            time.sleep(0.5)
        yield started
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(Replica.close, started))


def _adapters(folder: Path) -> dict[str, Path]:
    from transformers import DiffusionGemmaForBlockDiffusion

    made = {}
    for seed, modules in enumerate((ENCODER, DECODER, f"({ENCODER})|({DECODER})")):
        made[f"adapter{seed}"] = folder / f"adapter{seed}"
        model = DiffusionGemmaForBlockDiffusion.from_pretrained(SHIPPED)
        adapt(model, made[f"adapter{seed}"], seed=seed, size=3.0, target_modules=modules)
    return made


def soak(
    minutes: float, kill_every: float, seed: int, folder: Path
) -> tuple[Counter[str], list[str]]:
    """Trouble two servers for a while.

    Args:
        minutes: For how long.
        kill_every: Seconds between two kills.
        seed: Of what is drawn.
        folder: For adapters and the servers' logs.

    Returns:
        What happened how often, and what must not happen.
    """
    adapters = _adapters(folder)
    models = [MODEL, *adapters]
    wrong: list[str] = []
    with _replicas(folder) as replicas:
        balancer = Balancer(replicas, adapters)
        asked = list(itertools.product(models, range(len(REQUESTS))))
        expected = {each: balancer.answer(*each) for each in asked}
        for model in adapters:
            # Else one that is not applied would go unnoticed.
            changed = sum(expected[model, i] != expected[MODEL, i] for i in range(len(REQUESTS)))
            assert changed > len(REQUESTS) // 2, f"{model} changes {changed} answers"
        over = threading.Event()

        def client(number: int) -> None:
            draws = random.Random(1000 * seed + number)
            while not over.is_set():
                each = draws.choice(asked)
                try:
                    if balancer.answer(*each) != expected[each]:
                        wrong.append(f"other tokens: {each}")
                except (TimeoutError, AssertionError) as error:
                    wrong.append(str(error))

        def come_and_go() -> None:
            draws = random.Random(seed)
            while not over.wait(5):
                server = draws.choice(replicas).server
                if server is not None:
                    balancer.unload(server, draws.choice(list(adapters)))

        with ThreadPoolExecutor(NUM_CLIENTS + 1) as pool:
            running: list[Any] = [pool.submit(client, number) for number in range(NUM_CLIENTS)]
            running.append(pool.submit(come_and_go))
            try:
                _kill_in_turn(replicas, balancer, minutes, kill_every, wrong)
            finally:
                over.set()
            for future in running:
                future.result()
        for replica in replicas:
            while replica.server is None:
                time.sleep(0.5)
            replica.server.wait_until_idle()
    return balancer.counts, wrong


def _kill_in_turn(
    replicas: list[Replica],
    balancer: Balancer,
    minutes: float,
    kill_every: float,
    wrong: list[str],
) -> None:
    """Kill one server after another, as soon as both are there, and see whether it had grown."""
    end = time.monotonic() + 60 * minutes
    for replica in itertools.cycle(replicas):
        while not all(each.server for each in replicas):
            time.sleep(0.5)
        before = replica.server.resident_bytes()
        time.sleep(kill_every)
        if time.monotonic() > end:
            return
        if (grown := replica.server.resident_bytes() - before) > GROWTH_BYTES:
            wrong.append(f"{replica.name} has grown by {grown / 1024**2:.0f} MiB")
        replica.kill()
        balancer.counts["killed"] += 1
        print(f"{dict(balancer.counts)}, {len(wrong)} wrong", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Print what happened; exit status 1 if anything did that must not."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.robustness.replicas", description=__doc__
    )
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--kill-every", type=float, default=60, help="seconds")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        counts, wrong = soak(arguments.minutes, arguments.kill_every, arguments.seed, Path(folder))
    for name, count in sorted(counts.items()):
        print(f"{count:7d}  {name}")
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
