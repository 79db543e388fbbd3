"""Sends thousands of requests of every kind to a server, and checks it after each round.

    python -m tests.robustness.campaign --requests 10000 --seed 1 --order async --tp 2
    python -m tests.robustness.campaign --minutes 300
    python -m tests.robustness.campaign --requests 2000 --ways
    python -m tests.robustness.campaign --replay failures/1-137.json

Requests are drawn from the seed alone (``requests.py``), and sent by clients that do not wait for
one another, some of which leave early. The server has a KV cache too small for all of them, so that
requests are preempted. After each round: nothing runs or waits, no KV block is in use, a request is
answered, and a sample of the answers with a seed is what the same requests get alone. At the end
memory is where it was. What fails is sent again alone, printed, and kept as a file; a server that
dies is started again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from tests.robustness.client import Outcome, answers, send
from tests.robustness.requests import CHAT, COMPLETIONS, KINDS, Request, Served, draw_request
from tests.support.engines.server import PARSERS, Server, start_server, stop_server
from tests.support.models.checkpoints import SHIPPED

ROUND = 250
# Clients at a time: more than the server runs at once.
CLIENTS = 16
# Until a request is given up on: the slowest ends in a tenth of it on two busy cores.
DEADLINE_SECONDS = 120.0
# Alone, a request of the grammar takes a second or two.
ALONE_SECONDS = 45.0
COMPARED_A_ROUND = 12
# One process of the server may have no more address space, where nothing needs more: a request that
# wants all memory ends that process, and not others of the machine.
ADDRESS_SPACE_BYTES = 12 * 1024**3
# What allocators and caches of compiled grammars may take between the first quarter and the end.
ALLOWED_GROWTH_BYTES = 96 * 1024**2
# A connection for each request: one that is kept may be closed by the server as it is used again.
UNSHARED = httpx.Limits(max_connections=None, max_keepalive_connections=0)
# Failures in a line each; all are kept as files.
PRINTED = 40
# Of the shipped DiffusionGemma, its own first.
WAYS = ("entropy_bound", "linear_spec", "autoregressive")
SORTS = ("answered", "refused", "aborted", "vLLM's own", "failed")


@dataclass
class Failure:
    """Something that must not be.

    Attributes:
        what: One line.
        request: What was sent, where it is about one request.
        number: Its number in the campaign.
        outcome: What became of it.
    """

    what: str
    request: Request | None = None
    number: int | None = None
    outcome: Outcome | None = None


@dataclass
class Tally:
    """What a campaign has seen.

    Attributes:
        counts: Requests by kind and sort.
        own: Reasons of errors that are vLLM's own.
        num_compared: Answers that were asked for again alone.
        rss: Bytes of all processes of the server after each round.
        failures: In the order in which they were found.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)
    num_compared: int = 0
    rss: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def table(self) -> str:
        """Requests by kind, as Markdown."""
        lines = ["| kind | sent | " + " | ".join(SORTS) + " |", "|---" * (len(SORTS) + 2) + "|"]
        kinds = sorted(set(KINDS))
        for name, chosen in [*((kind, [kind]) for kind in kinds), ("all", kinds)]:
            counts = [sum(self.counts[kind, sort] for kind in chosen) for sort in SORTS]
            total = sum(counts)
            cells = [f"{count} ({count / max(total, 1):.1%})" for count in counts]
            lines.append(f"| {name} | {total} | " + " | ".join(cells) + " |")
        return "\n".join(lines)


def describe(
    server: Server, *, images: bool, ways: Sequence[str] = (), has_priorities: bool = False
) -> Served:
    """Describe what a server can be sent."""
    openapi = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    (model,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    length = model["max_model_len"]
    return Served(
        server.canvas_length, server.vocab_size, length, images, openapi, ways, has_priorities
    )


def send_all(server: Server, requests: Sequence[Request]) -> list[Outcome]:
    """Send requests from ``CLIENTS`` clients, each of which takes the next when it is free.

    Once the server's process has ended, what is left is not sent.
    """
    with (
        httpx.Client(base_url=server.url, limits=UNSHARED) as client,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):

        def send_one(request: Request) -> Outcome:
            if server.process.poll() is not None:
                return Outcome(None, "", 0.0, "unsent")
            return send(client, request, DEADLINE_SECONDS)

        return list(pool.map(send_one, requests))


def send_alone(server: Server, request: Request) -> Outcome:
    """Send one request to an idle server, by a client that waits for it."""
    with httpx.Client(base_url=server.url, limits=UNSHARED) as client:
        return send(client, dataclasses.replace(request, leaves_after=None), ALONE_SECONDS)


def run_round(
    server: Server, served: Served, seed: int, numbers: range, tally: Tally, *, compared: int
) -> None:
    """Send some requests of a campaign and check what must hold when they are over."""
    requests = [draw_request(served, seed, number) for number in numbers]
    outcomes = send_all(server, requests)
    comparable = []
    for number, request, outcome in zip(numbers, requests, outcomes, strict=True):
        sort, what = outcome.sort, ""
        if outcome.ending == "unsent":
            continue
        if sort == "failed":
            what = f"{outcome.ending}, status {outcome.status}"
            own = outcome.vllms_own(request)
            if own and (not own.heals or send_alone(server, request).sort != "failed"):
                tally.own[own.reason] += 1
                sort, what = "vLLM's own", ""
        elif request.kind == "valid" and sort == "refused":
            sort, what = "failed", "a valid request was refused"
        if what:
            tally.failures.append(Failure(what, request, number, outcome))
        tally.counts[request.kind, sort] += 1
        if sort == "answered" and _is_seeded(request):
            comparable.append((number, request, outcome))
    try:
        server.wait_until_idle()
        server.assert_alive()
    except (AssertionError, httpx.TransportError) as error:
        tally.failures.append(Failure(f"after requests {numbers}: {error!r}"))
        return
    chosen = random.Random(f"{seed}/{numbers.start}").sample(
        comparable, min(compared, len(comparable))
    )
    for number, request, outcome in chosen:
        tally.num_compared += 1
        alone = send_alone(server, request)
        if (own := alone.vllms_own(request)) and own.heals:
            alone = send_alone(server, request)
        if alone.sort != "answered" or answers(request, alone) != answers(request, outcome):
            tally.failures.append(Failure("another answer alone", request, number, outcome))
    tally.rss.append(server.resident_bytes())


def _is_seeded(request: Request) -> bool:
    body = request.body
    is_generation = request.path in (COMPLETIONS, CHAT) and isinstance(body, dict)
    return is_generation and isinstance(body.get("seed"), int)


def check_memory(tally: Tally) -> None:
    """Add a failure if memory grew after the first quarter of the rounds."""
    if len(tally.rss) < 8:
        return
    settled, last = tally.rss[len(tally.rss) // 4], tally.rss[-1]
    if last > settled + ALLOWED_GROWTH_BYTES:
        grown = (last - settled) / 2**20
        tally.failures.append(Failure(f"memory grew by {grown:.0f} MiB after the first quarter"))


class OwnServer:
    """The server of a campaign of its own, started again when it dies."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self._folder = folder
        self._options = options
        self._num_starts = 0
        self.server: Server

    def start(self) -> Server:
        """Start it, or start it again."""
        if self._num_starts:
            stop_server(self.server)
        self._num_starts += 1
        log = self._folder / f"server-{self._num_starts}.log"
        # A grammar's compiled form is kept up to this size; what grows beyond it is a leak.
        self.server = start_server(SHIPPED, log, *self._options, VLLM_XGRAMMAR_CACHE_MB="16")
        return self.server

    def is_alive(self) -> bool:
        """Return whether the server answers."""
        try:
            return httpx.get(f"{self.server.url}/health", timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    def fails(self, request: Request) -> str | None:
        """Return how a request fails alone, or ``None`` if it does not."""
        if not self.is_alive():
            self.start()
        outcome = send_alone(self.server, request)
        if outcome.sort == "refused" and request.kind == "valid":
            return "is refused"
        if outcome.sort != "failed" or outcome.vllms_own(request):
            return None
        if outcome.ending == "late":
            return "does not end"
        return f"status {outcome.status}" if self.is_alive() else "ends the engine"


def keep(own: OwnServer, failures: Sequence[Failure], folder: Path) -> None:
    """Write failures to files that ``--replay`` reads, and print how each fails alone."""
    folder.mkdir(parents=True, exist_ok=True)
    for failure in failures:
        if failure.request is not None:
            record = json.dumps(dataclasses.asdict(failure), indent=1)
            (folder / f"{failure.number}.json").write_text(record)
            how = own.fails(failure.request) or "not when it is sent alone"
            print(f"{failure.number}: {failure.what}; {how}", flush=True)


def options_of(order: str, num_ranks: int, ways: Sequence[str] = ()) -> list[str]:
    """Return options of ``vllm serve``: images, priorities, and a cache for one long request."""
    options = [*PARSERS, "--scheduling-policy", "priority"]
    options += ["--limit-mm-per-prompt", '{"image": 1, "video": 0, "audio": 0}']
    options += ["--max-model-len", "512", "--kv-cache-memory-bytes", str(5 * 1024**2 // 4)]
    options += ["--async-scheduling" if order == "async" else "--no-async-scheduling"]
    if ways:
        # Beside one another, since each way has protections of its own.
        diffusion = {"rules": ways, "never_empty": True}
        options += ["--additional-config", json.dumps({"diffusion": diffusion})]
    return [*options, "--tensor-parallel-size", str(num_ranks)]


def campaign(
    own: OwnServer,
    seed: int,
    num_requests: int,
    until: float,
    report: Callable[[str], None],
    ways: Sequence[str] = (),
) -> Tally:
    """Run rounds of requests until there were ``num_requests``, or until the time ``until``."""
    tally = Tally()
    served = describe(own.start(), images=True, ways=ways, has_priorities=True)
    preempted = 0.0
    for first in range(0, num_requests, ROUND):
        if time.monotonic() > until:
            break
        numbers = range(first, min(first + ROUND, num_requests))
        num_before, begun = len(tally.failures), time.monotonic()
        run_round(own.server, served, seed, numbers, tally, compared=COMPARED_A_ROUND)
        if not own.is_alive():
            tally.failures.append(Failure(f"the server died in requests {numbers}"))
            own.start()
            # The memory of a new process is not growth.
            tally.rss.clear()
        preempted = own.server.metric("vllm:num_preemptions_total")
        report(
            f"{numbers.stop} requests, {len(tally.failures) - num_before} new failures, "
            f"{time.monotonic() - begun:.0f} s, {preempted:.0f} preemptions so far"
        )
    check_memory(tally)
    if not preempted and tally.rss:
        tally.failures.append(Failure("nothing was preempted: the KV cache is too large"))
    return tally


def main() -> int:
    """Run a campaign, print its table, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10**9, help="how many")
    parser.add_argument("--minutes", type=float, default=10**6, help="stop after as long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--order", choices=["sync", "async"], default="sync")
    parser.add_argument("--tp", type=int, choices=[1, 2], default=1, help="tensor-parallel ranks")
    parser.add_argument("--ways", action="store_true", help="of decoding, chosen by each request")
    parser.add_argument("--folder", type=Path, help="for logs and failures")
    parser.add_argument("--replay", type=Path, help="a kept failure, to be sent alone")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="campaign-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {arguments.seed}, {arguments.order}, TP {arguments.tp}, logs in {folder}")
    if not torch.cuda.is_available():
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    # So that a campaign that is ended takes its server with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    ways = WAYS if arguments.ways else ()
    own = OwnServer(folder, options_of(arguments.order, arguments.tp, ways))
    begun = time.monotonic()
    try:
        if arguments.replay:
            own.start()
            request = Request(**json.loads(arguments.replay.read_text())["request"])
            failed = own.fails(request)
            print(failed or "does not fail alone")
            return int(failed is not None)
        tally = campaign(
            own,
            arguments.seed,
            arguments.requests,
            begun + 60 * arguments.minutes,
            lambda line: print(f"[{time.monotonic() - begun:6.0f} s] {line}", flush=True),
            ways,
        )
        print(tally.table())
        for reason, count in tally.own.most_common():
            print(f"vLLM's own: {count} x {reason}")
        print(f"{tally.num_compared} answers with a seed asked for again alone")
        print("MiB after each round:", *(rss >> 20 for rss in tally.rss))
        for failure in tally.failures[:PRINTED]:
            text = failure.outcome.text[:300] if failure.outcome else ""
            print(f"FAILED {failure.number}: {failure.what} {text}")
        keep(own, tally.failures, folder / "failures")
        return int(bool(tally.failures))
    finally:
        if hasattr(own, "server"):
            stop_server(own.server)


if __name__ == "__main__":
    sys.exit(main())
