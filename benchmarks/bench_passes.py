"""How many forward passes an answer takes: this package's orders of passes, and stock vLLM.

    python benchmarks/bench_passes.py
    python benchmarks/bench_passes.py --checkpoint PATH --rounds 5
    python benchmarks/bench_passes.py --load

Each order serves the same held-out prompts of the shipped checkpoint in a process of its own:
answers of one canvas and of several, alone and in a batch. A pass is counted whenever the engine
schedules one. Stock's own class runs on the same platform, and draws its own noise.

With ``--load`` the same 64 prompts are served 1, 8 and 32 at a time, and rows are counted for each
token of the answers (``tests/support/row_counts.py``). Padding is what the graphs of a GPU would add.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from data_file import DataFile

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from tests.support.row_counts import RowCounter, RowCounts
from tests.support.row_counts import serve as served_at_once
from vllm_diffusion.cli.checkpoint import shipped_checkpoint
from vllm_diffusion.startup.passes import capture_sizes

# First: a package of the same name as one of the examples may be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "checkpoints"))

ORDERS: dict[str, dict[str, Any]] = {
    "fused": {},
    "separate": {"additional_config": {"diffusion": {"fused_encode": False}}},
    "asynchronous": {"async_scheduling": True},
    "stock, sync": {"async_scheduling": False},
    "stock, async": {"async_scheduling": True},
}
STOCK_PLUGINS = "vllm_diffusion_cpu"
BATCH = 4
MAX_TOKENS = 192
# Requests at once, of all prompts of a load.
AT_ONCE = (1, 8, 32)
NUM_PROMPTS = 64


def workloads(tokenizer: Any) -> dict[str, list[list[int]]]:
    """Prompts as token ids: one canvas and several canvases, alone and in a batch."""
    from evaluate import prompt_token_ids
    from tiny_tasks import evaluation_set

    def prompts(family: str, is_long: bool) -> list[list[int]]:
        examples = [e for e in evaluation_set(family, 60) if (len(e.answer) > 70) == is_long]
        return [prompt_token_ids(tokenizer, example) for example in examples[:BATCH]]

    short, long = prompts("sums", False), prompts("upper", True)
    return {
        "one canvas, alone": short[:1],
        "several canvases, alone": long[:1],
        f"one canvas, batch of {BATCH}": short,
        f"several canvases, batch of {BATCH}": long,
    }


def load(tokenizer: Any) -> list[list[int]]:
    """Prompts of all families and many lengths, as token ids."""
    from evaluate import prompt_token_ids
    from tiny_tasks import FAMILIES, evaluation_set

    examples = zip(*(evaluation_set(family, NUM_PROMPTS) for family in FAMILIES), strict=True)
    mixed = [example for group in examples for example in group]
    return [prompt_token_ids(tokenizer, example) for example in mixed[:NUM_PROMPTS]]


def serve_load(order: str, checkpoint: str) -> list[dict[str, Any]]:
    """Row counts of one order at each number of requests; runs in a process of its own."""
    llm = engine(order, checkpoint, max(AT_ONCE))
    config = llm.llm_engine.vllm_config
    scheduler = config.scheduler_config
    sizes = capture_sizes(
        config.diffusion_config.canvas_length,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
    )
    counter = RowCounter(llm, sizes)
    requests = [(prompt, params(order, i)) for i, prompt in enumerate(load(llm.get_tokenizer()))]
    rows = []
    for at_once in AT_ONCE:
        counter.counts = RowCounts()
        outputs = served_at_once(llm, requests, at_once)
        tokens = [list(output.token_ids) for output in outputs]
        rows.append({"at_once": at_once, "tokens": tokens, "counts": asdict(counter.counts)})
    return rows


def engine(order: str, checkpoint: str, max_num_seqs: int) -> Any:
    """Start an engine with an order of passes."""
    from vllm import LLM

    return LLM(
        checkpoint,
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
        enable_prefix_caching=False,
        **ORDERS[order],
    )


def params(order: str, seed: int) -> Any:
    """Sampling parameters of a request; stock takes no seed."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=MAX_TOKENS, seed=None if order.startswith("stock") else seed)


def serve(order: str, checkpoint: str, rounds: int) -> list[dict[str, Any]]:
    """Counts and times of one order; runs in a process of its own."""
    llm = engine(order, checkpoint, BATCH)
    counter = RowCounter(llm)
    rows = []
    for name, prompts in workloads(llm.get_tokenizer()).items():
        requests = [(prompt, params(order, i)) for i, prompt in enumerate(prompts)]
        times = []
        for _ in range(rounds + 1):
            counter.counts, start = RowCounts(), time.perf_counter()
            outputs = served_at_once(llm, requests, len(requests))
            times.append(time.perf_counter() - start)
        rows.append(
            {
                "workload": name,
                "passes": counter.counts.passes,
                # The first round compiled what it needed.
                "seconds": statistics.median(times[1:]),
                "tokens": [list(output.token_ids) for output in outputs],
                "steps": [denoise_steps(output) for output in outputs],
            }
        )
    return rows


def denoise_steps(output: Any) -> list[int] | None:
    """Denoising steps of each canvas; stock does not say."""
    from vllm_diffusion.metrics import request_metrics

    metrics = request_metrics(output)
    return None if metrics is None else list(metrics.denoise_steps_per_canvas)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint")
    parser.add_argument("--rounds", type=int, default=5, help="timed repetitions")
    parser.add_argument("--orders", nargs="+", choices=ORDERS, default=list(ORDERS))
    parser.add_argument("--data", type=Path, help="file for the rows, as JSON lines")
    parser.add_argument("--load", action="store_true", help="count rows at 1, 8 and 32 requests")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.checkpoint is None:
        args.checkpoint = str(shipped_checkpoint())
    if args.serve:
        found = (
            serve_load(args.serve, args.checkpoint)
            if args.load
            else serve(args.serve, args.checkpoint, args.rounds)
        )
        args.out.write_text(json.dumps(found))
        return

    data = DataFile(args.data)
    results = {}
    for order in args.orders:
        print(f"serving: {order}", file=sys.stderr, flush=True)
        environment = os.environ | {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        if order.startswith("stock"):
            environment["VLLM_PLUGINS"] = STOCK_PLUGINS
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rows.json"
            command = [sys.executable, __file__, "--serve", order, "--out", str(out)]
            command += ["--checkpoint", args.checkpoint, "--rounds", str(args.rounds)]
            command += ["--load"] * args.load
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            results[order] = json.loads(out.read_text())
    if args.load:
        print_load(results, data)
    else:
        print_passes(results, data)


def print_load(results: dict[str, list[dict[str, Any]]], data: DataFile) -> None:
    """Print rows for each token, with the tokens of the first order and load as the reference."""
    names = [field.name for field in fields(RowCounts)]
    print(f"{'order':13} requests  tokens " + " ".join(f"{name:>9}" for name in names))
    reference = next(iter(results.values()))[0]["tokens"]
    for order, rows in results.items():
        for row in rows:
            num_tokens = sum(map(len, row["tokens"]))
            cells = {name: row["counts"][name] / num_tokens for name in names}
            same = (
                "" if row["tokens"] == reference or order.startswith("stock") else "  OTHER TOKENS"
            )
            print(
                f"{order:13} {row['at_once']:8} {num_tokens:7} "
                + " ".join(f"{cell:9.3f}" for cell in cells.values())
                + same
            )
            data.add(
                "rows", order=order, at_once=row["at_once"], tokens=num_tokens, **row["counts"]
            )


def print_passes(results: dict[str, list[dict[str, Any]]], data: DataFile) -> None:
    """Print passes and times of each workload."""
    print(f"{'workload':36} {'order':13} passes  denoise steps   ms a pass   tokens/s")
    reference = results.get("fused")
    for idx, row in enumerate(next(iter(results.values()))):
        for order, rows in results.items():
            found = rows[idx]
            steps = "not told"
            if found["steps"][0] is not None:
                steps = str(max(sum(of_request) for of_request in found["steps"]))
            num_tokens = sum(map(len, found["tokens"]))
            same = ""
            if reference and order != "fused" and not order.startswith("stock"):
                equal = found["tokens"] == reference[idx]["tokens"]
                same = "  same tokens" if equal else "  OTHER TOKENS"
            print(
                f"{row['workload']:36} {order:13} {found['passes']:6}  {steps:>13}   "
                f"{1e3 * found['seconds'] / found['passes']:9.1f}   "
                f"{num_tokens / found['seconds']:8.0f}{same}"
            )
            data.add(
                "passes",
                workload=row["workload"],
                order=order,
                passes=found["passes"],
                ms_a_pass=round(1e3 * found["seconds"] / found["passes"], 2),
                tokens_a_second=round(num_tokens / found["seconds"], 1),
            )


if __name__ == "__main__":
    main()
