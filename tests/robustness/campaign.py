"""Sends thousands of requests of every kind to a server, and checks it after each round.

    python -m tests.robustness.campaign --requests 10000 --seed 1 --order async --tp 2
    python -m tests.robustness.campaign --minutes 300
    python -m tests.robustness.campaign --seed 1 --first 137 --requests 1

Requests are drawn from the seed and their numbers alone (``requests.py``), so that the last command
sends one of the first again. They are sent by clients that do not wait for one another, some of
which leave early. The server has a KV cache too small for all of them, so that requests are
preempted. After each round: nothing runs or waits, no KV block is in use, a request is answered,
and a sample of the answers with a seed is what the same requests get alone. At the end memory is
where it was. Pairs of fields, in every way to decode, are those of ``tests/pairs``.
"""

import argparse
import dataclasses
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import torch

from tests.robustness.client import Outcome, answers, send
from tests.robustness.requests import CHAT, COMPLETIONS, KINDS, Request, Served, draw_request
from tests.support.engines.server import PARSERS, Server, start_server
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
SORTS = ("answered", "refused", "aborted", "vLLM's own", "failed")


@dataclass
class Tally:
    """What a campaign has seen.

    Attributes:
        counts: Requests by kind and sort.
        own: Reasons of errors that are vLLM's own.
        num_compared: Answers that were asked for again alone.
        rss: Bytes of all processes of the server after each round.
        failures: A line each, in the order in which they were found.
    """

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    own: Counter[str] = field(default_factory=Counter)
    num_compared: int = 0
    rss: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

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


def describe(server: Server, *, images: bool, has_priorities: bool = False) -> Served:
    """Describe what a server can be sent."""
    openapi = httpx.get(f"{server.url}/openapi.json", timeout=60).json()
    (model,) = httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]
    length = model["max_model_len"]
    return Served(server.canvas_length, server.vocab_size, length, images, openapi, has_priorities)


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
                return Outcome(None, "", "unsent")
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
            tally.failures.append(f"{number}: {what} {outcome.text[:300]}")
        tally.counts[request.kind, sort] += 1
        if sort == "answered" and _is_seeded(request):
            comparable.append((number, request, outcome))
    try:
        server.wait_until_idle()
        server.assert_alive()
    except (AssertionError, httpx.TransportError) as error:
        tally.failures.append(f"after requests {numbers}: {error!r}")
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
            tally.failures.append(f"{number}: another answer alone than {outcome.text[:300]}")
    tally.rss.append(server.resident_bytes())


def _is_seeded(request: Request) -> bool:
    body = request.body
    is_generation = request.path in (COMPLETIONS, CHAT) and isinstance(body, dict)
    return is_generation and isinstance(body.get("seed"), int)


def check_memory(tally: Tally) -> None:
    """Add a failure if memory grew after the first quarter of the rounds."""
    settled, last = tally.rss[len(tally.rss) // 4], tally.rss[-1]
    if last > settled + ALLOWED_GROWTH_BYTES:
        grown = (last - settled) / 2**20
        tally.failures.append(f"memory grew by {grown:.0f} MiB after the first quarter")


def options_of(order: str, num_ranks: int) -> list[str]:
    """Return options of ``vllm serve``: images, priorities, and a cache for one long request."""
    options = [*PARSERS, "--scheduling-policy", "priority"]
    options += ["--limit-mm-per-prompt", '{"image": 1, "video": 0, "audio": 0}']
    options += ["--max-model-len", "512", "--kv-cache-memory-bytes", str(5 * 1024**2 // 4)]
    options += ["--async-scheduling" if order == "async" else "--no-async-scheduling"]
    return [*options, "--tensor-parallel-size", str(num_ranks)]


def campaign(server: Server, seed: int, numbers: range, until: float) -> Tally:
    """Send requests in rounds, up to the time ``until`` or the end of the server."""
    tally = Tally()
    served = describe(server, images=True, has_priorities=True)
    for first in numbers[::ROUND]:
        if time.monotonic() > until:
            break
        some = range(first, min(first + ROUND, numbers.stop))
        begun = time.monotonic()
        run_round(server, served, seed, some, tally, compared=COMPARED_A_ROUND)
        if server.process.poll() is not None:
            tally.failures.append(f"the server died in requests {some}")
            return tally
        print(
            f"{some.stop} requests, {len(tally.failures)} failures, "
            f"{time.monotonic() - begun:.0f} s for the last {len(some)}",
            flush=True,
        )
    # A few rounds prove neither.
    if len(tally.rss) >= 8:
        check_memory(tally)
        if not server.metric("vllm:num_preemptions_total"):
            tally.failures.append("nothing was preempted: the KV cache is too large")
    return tally


def main() -> int:
    """Run a campaign, print its table, and return 1 if anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10**9, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--minutes", type=float, default=10**6, help="stop after as long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--order", choices=["sync", "async"], default="sync")
    parser.add_argument("--tp", type=int, choices=[1, 2], default=1, help="tensor-parallel ranks")
    arguments = parser.parse_args()
    log = Path(tempfile.mkdtemp(prefix="campaign-")) / "server.log"
    print(f"seed {arguments.seed}, {arguments.order}, TP {arguments.tp}, log in {log}")
    if not torch.cuda.is_available():
        resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    # So that a campaign that is ended takes its server with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    numbers = range(arguments.first, arguments.first + arguments.requests)
    until = time.monotonic() + 60 * arguments.minutes
    # A grammar's compiled form is kept up to 16 MB; what grows beyond it is a leak.
    options = options_of(arguments.order, arguments.tp)
    with start_server(SHIPPED, log, *options, VLLM_XGRAMMAR_CACHE_MB="16") as server:
        tally = campaign(server, arguments.seed, numbers, until)
    print(tally.table())
    for reason, count in tally.own.most_common():
        print(f"vLLM's own: {count} x {reason}")
    print(f"{tally.num_compared} answers with a seed asked for again alone")
    print("MiB after each round:", *(rss >> 20 for rss in tally.rss))
    print(*(f"FAILED {line}" for line in tally.failures), sep="\n")
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())
