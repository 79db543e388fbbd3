"""Our server and dlmserve's on the same LLaDA, asked in turns by the same clients."""

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from records import ROOT, Rows
from serving import write_tokenizer

from tests.support.engines.server import MODEL, free_port, start_server, stop_server
from tests.support.families import makers
from tests.support.families.model import MASK_ID

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
NUM_TOKENS = 128
# What the first request of each kind compiles or allocates is not measured.
WARM_UP = ((1, 4), (8, 2))


@dataclass
class Side:
    """A server under one name.

    Attributes:
        name: Of the side.
        pid: Leader of its group of processes.
        client: Asks it.
        seconds: Of each round.
        latencies: Of each request.
    """

    name: str
    pid: int
    client: httpx.Client
    seconds: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def ask(self, number: int, steps: int) -> list[str]:
        """Return the words of the answer to one of the prompts, of 40 to 117 words."""
        draw = random.Random(100 + number)
        asked = [
            f"w{draw.randrange(5, SIZES['vocab_size'])}" for _ in range(40 + 11 * (number % 8))
        ]
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": " ".join(asked)}],
            "temperature": 0,
            "max_tokens": NUM_TOKENS,
        }
        if self.name == "ours":
            arguments = {"block_length": NUM_TOKENS, "max_steps": steps, "strategy": "static"}
            xargs = {f"diffusion_{name}": value for name, value in arguments.items()}
            body |= {"ignore_eos": True, "vllm_xargs": xargs}
        else:
            body["num_denoising_steps"] = steps
        began = time.perf_counter()
        answer = self.client.post("/v1/chat/completions", json=body).raise_for_status().json()
        self.latencies.append(time.perf_counter() - began)
        assert answer["usage"]["completion_tokens"] == NUM_TOKENS, answer["usage"]
        words: list[str] = answer["choices"][0]["message"]["content"].split()
        return words

    def round(self, clients: int, steps: int) -> list[list[str]]:
        """Return the answers to as many requests at once, and note how long they took."""
        with ThreadPoolExecutor(clients) as pool:
            began = time.perf_counter()
            answers = [*pool.map(lambda number: self.ask(number, steps), range(clients))]
            self.seconds.append(time.perf_counter() - began)
        return answers


def save_model(folder: Path) -> Path:
    """Write a random LLaDA, with one word a token."""
    model = makers.llada(sharpness=6.0, **SIZES)
    with torch.no_grad():
        # No published loop forbids the mask and special tokens: they are never the likeliest.
        model.body.lm_head.weight[: MASK_ID + 1] = 0
    model.save(folder)
    write_tokenizer(folder, SIZES["vocab_size"])
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    return folder


@contextmanager
def both_sides(folder: Path, peer_python: Path) -> Iterator[tuple[Side, Side]]:
    """Start both servers on one core, the same for both."""
    checkpoint = save_model(folder / "model")
    cores = os.sched_getaffinity(0)
    # What is started from here on inherits it.
    os.sched_setaffinity(0, {max(cores)})
    publishers, port = os.environ["VLLM_DIFFUSION_PUBLISHERS"], free_port()
    script = ROOT / "benchmarks/dlmserve_on_cpu.py"
    command = [peer_python, script, checkpoint, publishers, str(port), str(MASK_ID)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    peer = subprocess.Popen(
        [*map(str, command)], env=environment | {"OMP_NUM_THREADS": "1"}, start_new_session=True
    )
    try:
        options = ("--no-enforce-eager", "--kv-cache-memory-bytes", str(2**29))
        log = folder / "server.log"
        ours = start_server(checkpoint, log, *options, OMP_NUM_THREADS="1")
        os.sched_setaffinity(0, cores)
        try:
            urls = {
                "ours": (ours.process.pid, ours.url),
                "dlmserve": (peer.pid, f"http://127.0.0.1:{port}"),
            }
            sides = [
                Side(name, pid, httpx.Client(base_url=url, timeout=600))
                for name, (pid, url) in urls.items()
            ]
            _await(sides[1].client, peer)
            yield sides[0], sides[1]
        finally:
            os.killpg(ours.process.pid, signal.SIGCONT)
            stop_server(ours)
    finally:
        os.killpg(peer.pid, signal.SIGKILL)


def _await(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        try:
            client.get("/health").raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise SystemExit("dlmserve did not start; what it printed is above")


def in_turns(sides: tuple[Side, Side], clients: int, steps: int) -> int:
    """Run a round of each side while the other one is stopped; return how many answers are the
    same.
    """
    answers = []
    for side, other in (sides, sides[::-1]):
        os.killpg(other.pid, signal.SIGSTOP)
        os.killpg(side.pid, signal.SIGCONT)
        answers.append(side.round(clients, steps))
    return sum(one == other for one, other in zip(*answers, strict=True))


def measure(rows: Rows, cells: list[tuple[int, int]], rounds: int, peer_python: Path) -> None:
    """Add a row for each number of clients and steps."""
    # Whoever ends this run ends the servers too, one of which is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with (
        tempfile.TemporaryDirectory() as folder,
        both_sides(Path(folder), peer_python) as sides,
    ):
        ours, peer = sides
        for clients, steps in WARM_UP:
            in_turns(sides, clients, steps)
        for clients, steps in cells:
            for side in sides:
                side.seconds, side.latencies = [], []
            num_equal = sum(in_turns(sides, clients, steps) for _ in range(rounds))
            ratios = [p / o for o, p in zip(ours.seconds, peer.seconds, strict=True)]
            speeds = [clients * NUM_TOKENS / statistics.median(s.seconds) for s in sides]
            rows.add(
                "whole sequences beside dlmserve",
                clients=clients,
                steps=steps,
                tokens_a_second=round(speeds[0], 1),
                dlmserve=round(speeds[1], 1),
                ratio=round(statistics.median(ratios), 2),
                range=f"{min(ratios):.2f} to {max(ratios):.2f}",
                median_seconds=round(statistics.median(ours.latencies), 2),
                dlmserve_seconds=round(statistics.median(peer.latencies), 2),
                equal_answers=f"{num_equal} of {rounds * clients}",
            )
