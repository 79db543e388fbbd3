"""How many forward passes an answer takes: this package's orders of passes, and stock vLLM.

    python benchmarks/bench_passes.py
    python benchmarks/bench_passes.py --checkpoint PATH --rounds 5

Each order serves the same held-out prompts of the shipped checkpoint in a process of its own:
answers of one canvas and of several, alone and in a batch. A pass is counted whenever the engine
schedules one. Stock's own class runs on the same platform, and draws its own noise.
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
from pathlib import Path
from typing import Any

from data_file import DataFile

from vllm_diffusion.cli.checkpoint import shipped_checkpoint

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


def serve(order: str, checkpoint: str, rounds: int) -> list[dict[str, Any]]:
    """Counts and times of one order; runs in a process of its own."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint,
        max_model_len=1024,
        max_num_seqs=BATCH,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
        enable_prefix_caching=False,
        **ORDERS[order],
    )
    core = llm.llm_engine.engine_core.engine_core
    num_passes = 0
    schedule = core.scheduler.schedule

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_passes
        output = schedule(*args, **kwargs)
        num_passes += output.total_num_scheduled_tokens > 0
        return output

    core.scheduler.schedule = counting
    rows = []
    for name, prompts in workloads(llm.get_tokenizer()).items():
        # Stock takes no seed.
        params = [
            SamplingParams(max_tokens=MAX_TOKENS, seed=None if order.startswith("stock") else i)
            for i in range(len(prompts))
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        times = []
        for _ in range(rounds + 1):
            num_passes, start = 0, time.perf_counter()
            outputs = [
                output.outputs[0] for output in llm.generate(requests, params, use_tqdm=False)
            ]
            times.append(time.perf_counter() - start)
        rows.append(
            {
                "workload": name,
                "passes": num_passes,
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
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.checkpoint is None:
        args.checkpoint = str(shipped_checkpoint())
    if args.serve:
        args.out.write_text(json.dumps(serve(args.serve, args.checkpoint, args.rounds)))
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
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            results[order] = json.loads(out.read_text())

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
