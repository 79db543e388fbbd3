"""How many forward passes an answer takes: this package's orders of passes, and stock vLLM.

    python benchmarks/bench_passes.py
    python benchmarks/bench_passes.py --checkpoint PATH --rounds 5
    python benchmarks/bench_passes.py --load

Each order serves the same held-out prompts of the shipped checkpoint in a process of its own:
answers of one canvas and of several, alone and in a batch. A pass is counted whenever the engine
schedules one. Stock's own class runs on the same platform. It takes no seed, so it draws ten times,
and its figures are medians with the range of its passes.

With ``--load`` the same 64 prompts are served 1, 8 and 32 at a time, and rows are counted for each
token of the answers (``tests/support/counters/row_counts.py``). Padding is what the graphs of a GPU
would add.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from records import Rows, parser_of

from tests.support.counters.row_counts import RowCounter, RowCounts
from tests.support.counters.row_counts import serve as served_at_once
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.startup.cuda_graphs import capture_sizes

ORDERS: dict[str, dict[str, Any]] = {
    "fused": {},
    "asynchronous": {"async_scheduling": True},
    "stock, sync": {"async_scheduling": False},
    "stock, async": {"async_scheduling": True},
}
BATCH = 4
MAX_TOKENS = 192
# Rounds of stock, whose passes differ from draw to draw.
STOCK_ROUNDS = 10
# Requests at once, of all prompts of a load.
AT_ONCE = (1, 8, 32)
NUM_PROMPTS = 64
Found = list[dict[str, Any]]


def prompts_of(tokenizer: Any, examples: list[Any]) -> list[list[int]]:
    """Prompts as token ids."""
    from evaluate import prompt_token_ids

    return [prompt_token_ids(tokenizer, example) for example in examples]


def several_canvases(count: int) -> list[Any]:
    """Examples with answers of several canvases."""
    from tiny_tasks import evaluation_set

    return [e for e in evaluation_set("upper", 20 * count) if len(e.answer) > 70][:count]


def load(tokenizer: Any) -> list[list[int]]:
    """Prompts of all families and many lengths, as token ids."""
    from tiny_tasks import FAMILIES, evaluation_set

    examples = zip(*(evaluation_set(family, NUM_PROMPTS) for family in FAMILIES), strict=True)
    mixed = [example for group in examples for example in group]
    return prompts_of(tokenizer, mixed[:NUM_PROMPTS])


def engine(order: str, options: argparse.Namespace, max_num_seqs: int, **changes: Any) -> Any:
    """Start an engine with an order of passes."""
    from vllm import LLM

    return LLM(
        options.checkpoint,
        max_model_len=1024,
        max_num_seqs=max_num_seqs,
        language_model_only=True,
        **(ORDERS[order] | changes),
    )


def params(order: str, seed: int) -> Any:
    """Sampling parameters of a request; stock takes no seed."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=MAX_TOKENS, seed=None if order.startswith("stock") else seed)


def serve_load(order: str, options: argparse.Namespace) -> Found:
    """Row counts of one order for each token, at each number of requests."""
    llm = engine(order, options, max(AT_ONCE), enable_prefix_caching=False)
    config = llm.llm_engine.vllm_config
    scheduler = config.scheduler_config
    sizes = capture_sizes(
        config.diffusion_config.canvas_length,
        scheduler.max_num_seqs,
        scheduler.max_num_batched_tokens,
    )
    counter = RowCounter(llm, sizes)
    requests = [(prompt, params(order, i)) for i, prompt in enumerate(load(llm.get_tokenizer()))]
    found = []
    for at_once in AT_ONCE:
        counter.counts = RowCounts()
        answers = served_at_once(llm, requests, at_once)
        said = [list(output.token_ids) for output in answers]
        num_tokens = sum(map(len, said))
        a_token = {name: round(n / num_tokens, 3) for name, n in asdict(counter.counts).items()}
        found.append({"at_once": at_once, "tokens": num_tokens, **a_token, "said": said})
    return found


def serve(order: str, options: argparse.Namespace) -> Found:
    """Counts and times of one order: one canvas and several canvases, alone and in a batch."""
    from tiny_tasks import evaluation_set

    from vllm_diffusion.metrics import request_metrics

    llm = engine(order, options, BATCH, enable_prefix_caching=False)
    counter = RowCounter(llm)
    short = [e for e in evaluation_set("sums", 60) if len(e.answer) <= 70][:BATCH]
    found = []
    for size in (1, BATCH):
        for name, examples in (
            ("one canvas", short),
            ("several canvases", several_canvases(BATCH)),
        ):
            prompts = prompts_of(llm.get_tokenizer(), examples[:size])
            requests = [(prompt, params(order, i)) for i, prompt in enumerate(prompts)]
            num_rounds = STOCK_ROUNDS if order.startswith("stock") else options.rounds
            passes, seconds, num_tokens = [], [], []
            for _ in range(num_rounds + 1):
                counter.counts, start = RowCounts(), time.perf_counter()
                answers = served_at_once(llm, requests, len(requests))
                seconds.append(time.perf_counter() - start)
                passes.append(counter.counts.passes)
                num_tokens.append(sum(len(output.token_ids) for output in answers))
            metrics = [request_metrics(output) for output in answers]
            steps = [sum(each.denoise_steps_per_canvas) for each in metrics if each is not None]
            # The first round compiled what it needed.
            rounds = [*zip(passes, seconds, num_tokens, strict=True)][1:]
            fewest, most = min(passes[1:]), max(passes[1:])
            row = {
                "workload": f"{name}, {'alone' if size == 1 else f'batch of {size}'}",
                "passes": statistics.median(passes[1:]),
                "range": "" if fewest == most else f"{fewest} to {most}",
                "denoising_steps": max(steps, default="not told"),
                "ms_a_pass": round(1e3 * statistics.median(s / p for p, s, _ in rounds), 2),
                "tokens_a_second": round(statistics.median(n / s for _, s, n in rounds), 1),
                "said": [list(output.token_ids) for output in answers],
            }
            found.append(row)
    return found


def in_a_process(order: str, options: argparse.Namespace) -> Found:
    """What one order serves, in a process of its own."""
    print(f"serving: {order}", file=sys.stderr, flush=True)
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    if order.startswith("stock"):
        environment["VLLM_PLUGINS"] = "vllm_diffusion_cpu"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, __file__, "--orders", order, "--out", str(out)]
        command += ["--checkpoint", options.checkpoint, "--rounds", str(options.rounds)]
        command += ["--load"] * options.load
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--checkpoint", default=str(shipped_checkpoint()))
    parser.add_argument("--rounds", type=int, default=5, help="timed repetitions of ours")
    parser.add_argument("--orders", nargs="+", help="default: all")
    parser.add_argument("--load", action="store_true", help="count rows at 1, 8 and 32 requests")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    orders = options.orders or list(ORDERS)
    if unknown := set(orders) - ORDERS.keys():
        parser.error(f"--orders: no {min(unknown)!r} among {', '.join(map(repr, ORDERS))}")
    table, measure = ("rows", serve_load) if options.load else ("passes", serve)
    if options.out:
        options.out.write_text(json.dumps(measure(orders[0], options)))
        return

    results = [in_a_process(order, options) for order in orders]
    data = Rows(options.data)
    said = [[row.pop("said") for row in found] for found in results]
    # Stock draws its own noise.
    ours = [here for order, here in zip(orders, said, strict=True) if not order.startswith("stock")]
    for index, rows in enumerate(zip(*results, strict=True)):
        # At every load the same is said.
        same_asked = [one for here in ours for one in (here if options.load else [here[index]])]
        for order, row, here in zip(orders, rows, said, strict=True):
            compares = len(same_asked) > 1 and not order.startswith("stock")
            same = here[index] == same_asked[0] if compares else None
            data.add(table, order=order, **row, same_tokens=same)


if __name__ == "__main__":
    main()
