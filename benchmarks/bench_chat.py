"""What ``keep_last_canvas`` costs and saves in a chat of several turns.

    python benchmarks/bench_chat.py
    python benchmarks/bench_chat.py --checkpoint PATH --turns 8

Each turn's prompt is the whole chat so far and a held-out prompt of the shipped checkpoint; the
engine runs empty between turns, as it does while somebody reads. Each order runs in a process of
its own. Everything is counted, nothing timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_diffusion.cli.checkpoint import shipped_checkpoint

ROOT = Path(__file__).resolve().parents[1]
# First: a package of the same name as one of the examples may be installed.
sys.path.insert(0, str(ROOT / "examples" / "checkpoints"))

ORDERS = {
    f"{order}, {'kept' if keep else 'default'}": {
        "async_scheduling": order == "asynchronous",
        "additional_config": {"diffusion": {"keep_last_canvas": keep}},
    }
    for order in ("fused", "asynchronous")
    for keep in (False, True)
}
COLUMNS = (
    ("passes", "passes, the answers'"),
    ("behind", "behind them"),
    ("prompt", "prompt tokens"),
    ("computed", "of them computed"),
    ("encoded", "rows encoded in all"),
)


def chat(order: str, checkpoint: str, turns: int) -> dict[str, Any]:
    """Counts of one order; runs in a process of its own."""
    from evaluate import prompt_token_ids
    from tiny_tasks import evaluation_set
    from vllm import LLM, SamplingParams

    from vllm_diffusion.metrics import request_metrics

    llm = LLM(
        checkpoint,
        max_model_len=1024,
        max_num_seqs=2,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
        **ORDERS[order],
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    schedule = scheduler.schedule
    passes = rows = 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes, rows
        output = schedule(*args, **kwargs)
        passes += output.total_num_scheduled_tokens > 0
        rows += output.total_num_scheduled_tokens
        return output

    scheduler.schedule = counting
    found: dict[str, Any] = dict.fromkeys((name for name, _ in COLUMNS), 0) | {"tokens": []}
    history: list[int] = []
    canvas_rows = 0
    # Replies of several canvases.
    examples = [e for e in evaluation_set("upper", 20 * turns) if len(e.answer) > 70]
    for turn, example in enumerate(examples[:turns]):
        history += prompt_token_ids(llm.get_tokenizer(), example)
        before = passes
        (output,) = llm.generate(
            [{"prompt_token_ids": list(history)}],
            SamplingParams(max_tokens=192, seed=turn),
            use_tqdm=False,
        )
        of_answers = passes - before
        while scheduler.has_requests():
            engine.step()
        canvas_rows += request_metrics(output.outputs[0]).canvas_rows
        found["passes"] += of_answers
        found["behind"] += passes - before - of_answers
        found["prompt"] += len(history)
        found["computed"] += len(history) - output.num_cached_tokens
        found["tokens"].append(list(output.outputs[0].token_ids))
        history += found["tokens"][-1]
    found["encoded"] = rows - canvas_rows
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", default=str(shipped_checkpoint()))
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        args.out.write_text(json.dumps(chat(args.serve, args.checkpoint, args.turns)))
        return

    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    print("order".ljust(22) + "  ".join(title for _, title in COLUMNS))
    reference = None
    for order in ORDERS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "chat.json"
            command = [sys.executable, __file__, "--serve", order, "--out", str(out)]
            command += ["--checkpoint", args.checkpoint, "--turns", str(args.turns)]
            subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
            found = json.loads(out.read_text())
        reference = reference or found["tokens"]
        same = "same tokens" if found["tokens"] == reference else "OTHER TOKENS"
        cells = [f"{found[name]:{len(title)}}" for name, title in COLUMNS]
        print(order.ljust(22) + "  ".join(cells) + f"  {same}", flush=True)


if __name__ == "__main__":
    main()
