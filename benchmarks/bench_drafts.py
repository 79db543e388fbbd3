"""Tokens a second of the shipped autoregressive model without its draft, with it, and adaptive.

    python benchmarks/bench_drafts.py
    python benchmarks/bench_drafts.py --requests 1 8 --rounds 5

One server for each, all of them up at once; the same greedy requests go to one after another, round by
round, so that a machine that is busy for a while is so for all. Two kinds of text: the tasks that the
pair was trained on, and noise that it was not. Prints seconds as ratios to those without a draft, tokens a
verification from the servers' own counters, and whether all said the same.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from tiny_tasks import FAMILIES, draw_question

from vllm_diffusion.cli.checkpoint import shipped_checkpoint, shipped_draft
from vllm_diffusion.cli.server import Server, vllm_serve
from vllm_diffusion.cli.shipped_server import speculative_config

ADAPTIVE = ("--additional-config", json.dumps({"drafting": {"adaptive": True}}))
NUM_TOKENS = 64
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def server(*options: str) -> Server:
    command = vllm_serve(
        str(shipped_checkpoint("qwen3")),
        *("--served-model-name", "tiny", "--max-model-len", "512", "--max-num-seqs", "32"),
        *options,
    )
    return Server(command, report=lambda line: None, timeout=900, environment=ENVIRONMENT)


def prompts(kind: str, count: int, rng: random.Random) -> list[str]:
    if kind == "noise":
        return ["".join(rng.choices("qzxjkvwy .;#%&", k=60)) for _ in range(count)]
    questions = (
        draw_question(rng, rng.choice(FAMILIES), "many", held_out=True) for _ in range(count)
    )
    return [question.question for question in questions]


def ask(running: Server, prompt: str, min_tokens: int) -> list[int]:
    response = httpx.post(
        f"{running.url}/v1/chat/completions",
        headers={"Authorization": f"Bearer {running.api_key}"},
        json={
            "model": "tiny",
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": NUM_TOKENS,
            "min_tokens": min_tokens,
            "return_token_ids": True,
        },
        timeout=600,
        trust_env=False,
    )
    response.raise_for_status()
    tokens: list[int] = response.json()["choices"][0]["token_ids"]
    return tokens


def verifications(running: Server) -> tuple[float, float]:
    counters = running.counters()
    names = ("num_drafts_total", "num_accepted_tokens_total")
    drafts, kept = (counters.get(f"vllm:spec_decode_{name}", 0.0) for name in names)
    return drafts, kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8, help="of a round, for each server")
    args = parser.parse_args()
    drafted = ("--speculative-config", speculative_config(shipped_draft()))
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(server(*options))
            for name, options in (
                ("no draft", ()),
                ("draft", drafted),
                ("adaptive", (*drafted, *ADAPTIVE)),
            )
        }
        print("text   requests  server    seconds  ratio  tokens/verification  same tokens")
        for kind in ("tasks", "noise"):
            for num_requests in args.requests:
                rng = random.Random(f"{kind} {num_requests}")
                seconds: dict[str, list[float]] = {name: [] for name in servers}
                before = {name: verifications(each) for name, each in servers.items()}
                differ: set[str] = set()
                # The first round is for what is compiled and cached.
                for index in range(args.rounds + 1):
                    asked = prompts(kind, args.prompts, rng)
                    # What is said of noise would end anywhere.
                    lengths = [NUM_TOKENS if kind == "noise" else 0] * len(asked)
                    said: dict[str, list[list[int]]] = {}
                    for name, running in servers.items():
                        start = time.perf_counter()
                        with ThreadPoolExecutor(num_requests) as pool:
                            said[name] = list(pool.map(ask, [running] * len(asked), asked, lengths))
                        if index:
                            seconds[name].append(time.perf_counter() - start)
                    differ |= {name for name in said if said[name] != said["no draft"]}
                for name, running in servers.items():
                    ratios = [
                        ours / plain
                        for ours, plain in zip(seconds[name], seconds["no draft"], strict=True)
                    ]
                    drafts, kept = (
                        now - then
                        for now, then in zip(verifications(running), before[name], strict=True)
                    )
                    print(
                        f"{kind:6} {num_requests:8}  {name:9} {statistics.median(seconds[name]):6.2f}  "
                        f"{statistics.median(ratios):5.2f}  {1 + kept / drafts if drafts else 1:19.1f}  "
                        f"{'no' if name in differ else 'yes'}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
