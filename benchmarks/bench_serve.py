"""Tokens a second and first-token times of ``vllm serve``, ours and stock, by ``vllm bench serve``.

    python benchmarks/bench_serve.py                       # one NVIDIA GPU: the 26B shape, dummy
    weights, FP8 python benchmarks/bench_serve.py --model PATH --concurrency 1 8 python
    benchmarks/bench_serve.py --model benchmarks/configs/sdar-8b --sides ours --steps 2

Three servers take turns: ours, stock as it comes, and stock tuned; each answers every
``--concurrency`` with prompts of every ``--input-len``. With ``--together`` all of them run at once
and are asked in turns, where a GPU has the memory: ``--options='--kv-cache-memory-bytes 5368709120
--max-num-seqs 8'``. Families that stock does not have are served by ours alone, and so are
DiffusionGemma's other ways (``--sides ours autoregressive``). Each canvas takes exactly ``--steps``
denoising steps and answers ignore their end, so that all do the same work. Without a GPU the
shipped checkpoint is served at small settings, which shows that the script works and nothing else.
``bench_routing.py`` says which experts such answers touch.
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from records import Rows, parser_of
from serving import Run, Side, Sweep, passes_of, prepare
from timing import STOCK, place

HERE = Path(__file__).resolve().parent
ON_GPU = torch.cuda.is_available()
TUNED = ["--max-num-seqs", "32"]
if ON_GPU:
    TUNED += ["--compilation-config", '{"max_cudagraph_capture_size":8192}']
# Environment and options of each side's server.
SIDES: dict[str, tuple[dict[str, str], list[str]]] = {
    "ours": ({"VLLM_DIFFUSION_DISABLE": "0"}, []),
    "stock": (STOCK, []),
    "tuned": (STOCK, TUNED),
}
# Ours with settings that are not its defaults: another attention, and the other ways in which
# DiffusionGemma decodes. Of random weights a draft keeps next to nothing.
VARIANTS = {
    name: (SIDES["ours"][0], ["--additional-config", json.dumps({"diffusion": settings})])
    for name, settings in {
        "cute": {"attention": "cute"},
        "autoregressive": {"rule": "autoregressive"},
        "linear_spec": {"rule": "linear_spec", "draft_length": 8},
    }.items()
}
VARIANTS["synchronous"] = SIDES["ours"][0], ["--no-async-scheduling"]


def row(
    side: str, asked: Run, run: dict[str, Any], options: argparse.Namespace, log: str
) -> dict[str, Any]:
    """One line of the table.

    ``ms_a_pass`` is known where one request runs at a time: a canvas comes as one chunk, after the
    passes of its order; token after token each takes a pass, and drafts have two kinds.
    """
    length, clients = asked
    passes = {"autoregressive": 1, "linear_spec": None}.get(side, passes_of(log, options.steps))
    return {
        "model": options.model.name,
        "drafted": "--speculative-config" in options.options,
        "side": side,
        "attention": attention_of(log),
        "input": length,
        "requests": clients,
        "tokens_a_second": round(run["output_throughput"], 1),
        "ms_to_first": round(run["median_ttft_ms"], 1),
        "ms_a_pass": round(run["median_itl_ms"] / passes, 3) if passes and clients == 1 else None,
    }


def attention_of(log: str) -> str:
    """Return the attention back end that a server's log names, with FlashAttention's version.

    Stock prints one line where it chooses the back end, another where the model's configuration or
    an option has chosen it, and a third with the version.
    """
    if ours := re.search(r"attention ([\w., ]+), scheduler", log):
        return ", ".join(path.rpartition(".")[2] for path in ours.group(1).split(", "))
    found = re.search(
        r"Using (\w+) attention backend|Using AttentionBackendEnum\.(\w+) backend", log
    )
    if found is None:
        return "not told"
    versions = sorted(set(re.findall(r"Using FlashAttention version (\d)", log)))
    return ", ".join([found.group(1) or found.group(2), *(f"FlashAttention {v}" for v in versions)])


def compared(rows: list[dict[str, Any]]) -> str:
    """Ours against the better stock, in tokens a second and in first-token time each by itself."""
    sides = {row["side"]: row for row in rows if row["side"] in SIDES}
    ours = sides.pop("ours", None)
    if ours is None or not sides:
        return ""
    speed = ours["tokens_a_second"] / max(row["tokens_a_second"] for row in sides.values())
    first = ours["ms_to_first"] / min(row["ms_to_first"] for row in sides.values())
    return f"ours: {speed:.2f} x tokens a second, {first:.2f} x time to the first token"


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    model = (
        "configs/diffusion-gemma-26b-fp8"
        if ON_GPU
        else "../vllm_diffusion/checkpoints/tiny_diffusion_gemma"
    )
    length = 1024 if ON_GPU else 64
    parser.add_argument("--model", type=Path, default=HERE / model)
    sides = SIDES | VARIANTS
    parser.add_argument("--sides", nargs="+", choices=sides, default=list(SIDES))
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 4, 8, 16, 32] if ON_GPU else [1, 2, 4]
    )
    parser.add_argument("--steps", type=int, default=16, help="denoising steps of a canvas")
    parser.add_argument("--input-len", type=int, nargs="+", default=[length], help="tokens")
    parser.add_argument("--output-len", type=int, default=length, help="tokens")
    parser.add_argument("--max-model-len", type=int, default=4096 if ON_GPU else 1024)
    parser.add_argument("--prompts", type=int, default=16 if ON_GPU else 4, help="at the least")
    parser.add_argument("--rounds", type=int, default=4, help="requests for each asked at once")
    parser.add_argument("--options", default="", help="further options of each server")
    parser.add_argument("--together", action="store_true", help="all servers at once")
    parser.add_argument("--start-seconds", type=int, default=1800)
    parser.add_argument("--out", type=Path, help="folder for logs and results")
    options = parser.parse_args(argv)
    out = options.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    runs = [(length, n) for length in options.input_len for n in options.concurrency]
    sweep = Sweep(
        out, runs, options.output_len, options.prompts, options.rounds, options.start_seconds
    )
    data, folder = Rows(options.data), out / "model"
    rows: dict[Run, list[dict[str, Any]]] = {run: [] for run in runs}
    try:
        prepare(options.model, folder, options.steps)
        words = ["--max-model-len", str(options.max_model_len)]
        asked = [
            Side(name, folder, [*words, *own, *shlex.split(options.options)], variables)
            for name, (variables, own) in sides.items()
            if name in options.sides
        ]
        for some in [asked] if options.together else [[side] for side in asked]:
            for name, run, found in sweep.of(some):
                rows[run].append(row(name, run, found, options, sweep.said(name)))
                data.add("serving", **rows[run][-1])
    except ValueError as error:
        sys.exit(str(error))
    print(place())
    for run, some in rows.items():
        if line := compared(some):
            print(f"{run}: {line}")
    print(f"logs and results: {out}")


if __name__ == "__main__":
    main()
