"""The table of ``bench_serve.sh``, from what ``vllm bench serve`` wrote.

python benchmarks/serve_report.py FOLDER --steps 16 --concurrency 1 8 32
"""

from __future__ import annotations

import argparse
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data_file import DataFile

# Times the better stock's tokens a second, the 26B shape in FP8 on an H200.
TARGETS = {1: 1.10, 8: 2.0, 32: 2.5}
# Milliseconds of a pass at one request, there too.
PASS_TARGET = 6.5


def read(folder: Path, side: str, clients: int) -> dict[str, Any]:
    """One run's result.

    Raises:
        ValueError: If a request of it failed.
    """
    found: dict[str, Any] = json.loads((folder / f"{side}-{clients}.json").read_text())
    if found["failed"] or found["completed"] != found["num_prompts"]:
        raise ValueError(
            f"{side} at {clients}: {found['failed']} of {found['num_prompts']} requests failed; see "
            f"{folder / f'{side}-{clients}.log'}."
        )
    return found


def compare(runs: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Ours against the better stock, in tokens a second and in first-token time each by itself."""
    stock = [run for side, run in runs.items() if side != "ours"]
    if "ours" not in runs or not stock:
        return {}
    return {
        "ratio": runs["ours"]["output_throughput"] / max(r["output_throughput"] for r in stock),
        "first": runs["ours"]["median_ttft_ms"] / min(r["median_ttft_ms"] for r in stock),
    }


def pass_ms(run: dict[str, Any], side: str, steps: int) -> float:
    """Milliseconds of a pass with one client: a canvas comes as one chunk, in its order's passes."""
    # Stock takes a pass of its own for a finished canvas.
    passes = steps if side == "ours" else steps + 1
    median: float = run["median_itl_ms"]
    return median / passes


def attention_of(log: str) -> str:
    """The attention back end that a server's log names."""
    found = re.search(r"Using (\w+) attention backend", log)
    ours = re.search(r"attention ([\w.]+), scheduler", log)
    return found.group(1) if found else ours.group(1).rpartition(".")[2] if ours else "not told"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gpu", default="")
    parser.add_argument("--sides", nargs="+", default=["ours", "stock", "tuned"])
    parser.add_argument("--steps", type=int, required=True, help="denoising steps of a canvas")
    parser.add_argument("--concurrency", nargs="+", type=int, required=True)
    parser.add_argument("--data", type=Path, help="file for the rows, as JSON lines")
    args = parser.parse_args()
    data = DataFile(args.data)

    packages = ", ".join(f"{name} {version(name)}" for name in ("vllm", "torch", "triton"))
    print(f"{args.gpu or 'CPU'}; {packages}")
    for side in args.sides:
        log = (args.folder / f"{side}.log").read_text(errors="replace")
        print(f"  {side}: attention {attention_of(log)}")
    columns = "".join(f"{side:>10}" for side in args.sides)
    print(f"{'':>8} | tokens/s {columns} | ms to first {columns} | against the better stock")
    for clients in args.concurrency:
        runs = {side: read(args.folder, side, clients) for side in args.sides}
        for side, one in runs.items():
            log = (args.folder / f"{side}.log").read_text(errors="replace")
            data.add(
                "serving",
                side=side,
                attention=attention_of(log),
                requests=clients,
                tokens_a_second=round(one["output_throughput"], 1),
                ms_to_first=round(one["median_ttft_ms"], 1),
                # Where an answer has several canvases.
                ms_a_pass=round(pass_ms(one, side, args.steps), 3) if clients == 1 else None,
            )
        speed = "".join(f"{runs[side]['output_throughput']:10.0f}" for side in args.sides)
        first = "".join(f"{runs[side]['median_ttft_ms']:10.0f}" for side in args.sides)
        verdict = ""
        if found := compare(runs):
            verdict = f"{found['ratio']:.2f} x tokens/s, {found['first']:.2f} x time to first"
            if args.gpu and clients in TARGETS:
                verdict += f" (targets: at least {TARGETS[clients]:.2f}, at most 1.00)"
        print(f"{clients:>8} | {'':8} {speed} | {'':11} {first} | {verdict}")
    alone = {side: read(args.folder, side, 1) for side in args.sides if 1 in args.concurrency}
    # An answer of one canvas has no time between canvases.
    if alone and all(run["median_itl_ms"] for run in alone.values()):
        times = [f"{side} {pass_ms(run, side, args.steps):.2f} ms" for side, run in alone.items()]
        target = f" (target of ours: at most {PASS_TARGET})" if args.gpu else ""
        print(f"a pass at one request: {', '.join(times)}{target}")


if __name__ == "__main__":
    main()
