"""Decisions a second of ``/v1/decisions``, and the passes that they take: ours and stock's class.

    python benchmarks/bench_decisions.py
    python benchmarks/bench_decisions.py --clients 1 --questions 1 8 --texts 8 --rounds 5

Both serve the same checkpoint on the same platform at once and take turns, round by round, on texts
that neither has seen, with so many questions about each, in a canvas each or all on one. Each
client asks about one text after another. A pass is counted by vLLM's own log of its iterations.
"""

import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from records import Rows, parser_of
from timing import STOCK

from tests.support.engines.server import Server, start_server
from vllm_diffusion.checkpoints import shipped_checkpoint

WORDS = (
    *("red", "green", "blue", "sky", "rose", "grass", "stone", "water"),
    *("light", "dark", "cold", "warm", "near", "far", "old", "new"),
)


def question(number: int) -> dict[str, Any]:
    """One of three kinds."""
    colour = WORDS[number % 3]
    return [
        {"type": "predicate", "name": f"p{number}", "instructions": f"Is it {colour}?"},
        {
            "type": "choice",
            "name": f"c{number}",
            "instructions": f"What is {colour}?",
            "choices": [{"value": "stone"}, {"value": "grass"}],
        },
        {
            "type": "score",
            "name": f"s{number}",
            "instructions": f"How {colour} is it?",
            "levels": [{"label": "not"}, {"label": "rather"}, {"label": "very"}],
        },
    ][number % 3]


def passes(server: Server) -> int:
    """Passes that ran so far: vLLM logs a line for each that had rows."""
    server.wait_until_idle()
    return server.log.read_text(errors="replace").count("Iteration(")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=shipped_checkpoint())
    parser.add_argument("--questions", type=int, nargs="+", default=[1, 8], help="about a text")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 24], help="at once")
    parser.add_argument("--words", type=int, default=80, help="of a text")
    parser.add_argument("--texts", type=int, default=6, help="of each client in a round")
    parser.add_argument("--rounds", type=int, default=4, help="of each side, in turn")
    args = parser.parse_args()
    data, chosen = Rows(args.data), random.Random(0)

    def ask(server: Server, clients: int, count: int, joint: bool) -> float:
        """Seconds of a round."""
        num_texts = clients * args.texts
        texts = [" ".join(chosen.choices(WORDS, k=args.words)) for _ in range(num_texts)]

        def ask_about(text: str) -> None:
            body = {"input": text, "questions": [question(i) for i in range(count)], "joint": joint}
            response = server.post("/v1/decisions", body)
            assert response.status_code == 200, response.text

        with ThreadPoolExecutor(clients) as at_once:
            start = time.perf_counter()
            list(at_once.map(ask_about, texts))
            return time.perf_counter() - start

    servers: dict[str, Server] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for side, variables in (("ours", {}), ("stock", STOCK)):
            print(f"starting: {side}", file=sys.stderr, flush=True)
            options = ("--enable-logging-iteration-details", "--max-num-seqs", "24")
            server = start_server(args.checkpoint, folder / f"{side}.log", *options, **variables)
            servers[side] = stack.enter_context(server)
        asked = [
            (clients, n, joint)
            for clients in args.clients
            for n in args.questions
            for joint in (False, True)
            if n > 1 or not joint
        ]
        for clients, count, joint in asked:
            seconds: dict[str, list[float]] = {side: [] for side in servers}
            counted: dict[str, list[float]] = {side: [] for side in servers}
            for _ in range(args.rounds + 1):
                for side, server in servers.items():
                    before = passes(server)
                    seconds[side].append(ask(server, clients, count, joint))
                    counted[side].append((passes(server) - before) / (clients * args.texts))
            for side in servers:
                # The first round compiled what it needed.
                median = statistics.median(seconds[side][1:])
                data.add(
                    "decisions",
                    clients=clients,
                    questions=count,
                    asked="on one canvas" if joint else "a canvas each",
                    side=side,
                    passes_a_text=round(statistics.mean(counted[side][1:]), 2),
                    decisions_a_second=round(clients * count * args.texts / median, 1),
                )


if __name__ == "__main__":
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    main()
