"""Tokens a second and first-token times of ``vllm serve``, ours and stock, by ``vllm bench sweep``.

    python benchmarks/bench_serve.py                       # one NVIDIA GPU: the 26B shape, dummy weights, FP8
    python benchmarks/bench_serve.py --model PATH --concurrency 1 8
    python benchmarks/bench_serve.py --model benchmarks/configs/sdar-8b --sides ours --steps 2

Three servers take turns: ours, stock as it comes, and stock tuned; each answers every ``--concurrency``
with prompts of every ``--input-len``. Families that stock does not have are served by ours alone.
Each canvas takes exactly ``--steps`` denoising steps and answers ignore their end, so that all do the
same work. Without a GPU the shipped checkpoint is served at small settings, which shows that the
script works and nothing else. ``bench_routing.py`` says which experts such answers touch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from data_file import DataFile
from serve_folder import prepare
from timing import device_name

from vllm_diffusion.cli.server import free_port

HERE = Path(__file__).resolve().parent
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
NO_IMAGES = '{"image":0,"video":0,"audio":0}'
ON_GPU = torch.cuda.is_available()
# Stock's own classes need our platform to run on a CPU.
STOCK = {"VLLM_DIFFUSION_DISABLE": "1"} if ON_GPU else {"VLLM_PLUGINS": "vllm_diffusion_cpu"}
TUNED = ["--max-num-seqs", "32"]
if ON_GPU:
    TUNED += ["--compilation-config", '{"max_cudagraph_capture_size":8192}']
# Environment and options of each side's server.
SIDES: dict[str, tuple[dict[str, str], list[str]]] = {
    "ours": ({"VLLM_DIFFUSION_DISABLE": "0"}, []),
    "stock": (STOCK, []),
    "tuned": (STOCK, TUNED),
}
LOG_CHARACTERS = 4000
# Tokens of a prompt, and requests at once.
Run = tuple[int, int]


def sweep(side: str, folder: Path, options: argparse.Namespace) -> None:
    """Serve a folder as one side does, and ask it at every concurrency.

    Results are ``OUT/SIDE/*/summary.json``, and what was printed is ``OUT/SIDE.log``.
    """
    environment, arguments = SIDES[side]
    arguments = [*arguments, *shlex.split(options.options)]
    address = ["--host", "127.0.0.1", "--port", str(free_port())]
    load_format = "auto" if any(folder.glob("*.safetensors")) else "dummy"
    serve = [*VLLM, "serve", str(folder), *address, "--served-model-name", "model"]
    serve += ["--load-format", load_format, "--max-model-len", str(options.max_model_len)]
    serve += ["--limit-mm-per-prompt", NO_IMAGES, *arguments]
    # Stock refuses any temperature but 1.
    bench = [*VLLM, "bench", "serve", *address, "--model", "model", "--tokenizer", str(folder)]
    bench += ["--dataset-name", "random", "--random-output-len", str(options.output_len)]
    bench += ["--ignore-eos", "--temperature", "1", "--disable-tqdm"]
    asked = [
        {
            "random_input_len": length,
            "max_concurrency": clients,
            "num_prompts": max(4 * clients, options.prompts),
            "num_warmups": clients,
            "seed": clients,
        }
        for length, clients in options.runs
    ]
    parameters = options.out / "bench_params.json"
    parameters.write_text(json.dumps(asked))
    command = [*VLLM, "bench", "sweep", "serve", "--show-stdout", "--num-runs", "1"]
    command += ["--serve-cmd", shlex.join(serve), "--bench-cmd", shlex.join(bench)]
    # Prompts of two runs differ, so that no cache has to be emptied.
    command += ["--after-bench-cmd", "true", "--bench-params", str(parameters)]
    command += ["--server-ready-timeout", str(options.start_seconds)]
    command += ["--output-dir", str(options.out), "--experiment-name", side]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    with (options.out / f"{side}.log").open("wb") as log:
        # What it wrote decides: its own table of all results needs pandas, which may be missing.
        subprocess.run(
            command, env=os.environ | quiet | environment, stdout=log, stderr=log, check=False
        )


def read(out: Path, side: str, runs: list[Run]) -> dict[Run, dict[str, Any]]:
    """One side's results by the length of prompts and the number of requests at once.

    Raises:
        ValueError: If a result is missing, or a request failed.
    """
    found: dict[Run, dict[str, Any]] = {}
    for path in (out / side).glob("*/summary.json"):
        (run,) = json.loads(path.read_text())
        found[run["random_input_len"], run["max_concurrency"]] = run
    log = out / f"{side}.log"
    for length, clients in runs:
        if (length, clients) not in found:
            tail = log.read_text(errors="replace")[-LOG_CHARACTERS:]
            raise ValueError(
                f"{tail}\n{side} did not answer {clients} at once with prompts of {length}; its log "
                f"is {log}."
            )
        run = found[length, clients]
        if run["failed"] or run["completed"] != run["num_prompts"]:
            count = f"{run['failed']} of {run['num_prompts']}"
            raise ValueError(f"{side} at {clients}: {count} requests failed; see {log}.")
    return found


def row(
    side: str, asked: Run, run: dict[str, Any], options: argparse.Namespace, log: str
) -> dict[str, Any]:
    """One line of the table.

    ``ms_a_pass`` is known where one request runs at a time: a canvas comes as one chunk, after the
    passes of its order. Stock takes a pass of its own for a finished canvas.
    """
    length, clients = asked
    passes = options.steps if side == "ours" else options.steps + 1
    return {
        "model": options.model.name,
        "drafted": "--speculative-config" in options.options,
        "side": side,
        "attention": attention_of(log),
        "input": length,
        "requests": clients,
        "tokens_a_second": round(run["output_throughput"], 1),
        "ms_to_first": round(run["median_ttft_ms"], 1),
        "ms_a_pass": round(run["median_itl_ms"] / passes, 3) if clients == 1 else None,
    }


def attention_of(log: str) -> str:
    """The attention back end that a server's log names."""
    found = re.search(r"Using (\w+) attention backend", log)
    ours = re.search(r"attention ([\w.]+), scheduler", log)
    return found.group(1) if found else ours.group(1).rpartition(".")[2] if ours else "not told"


def compared(rows: list[dict[str, Any]]) -> str:
    """Ours against the better stock, in tokens a second and in first-token time each by itself."""
    sides = {row["side"]: row for row in rows}
    ours = sides.pop("ours", None)
    if ours is None or not sides:
        return ""
    speed = ours["tokens_a_second"] / max(row["tokens_a_second"] for row in sides.values())
    first = ours["ms_to_first"] / min(row["ms_to_first"] for row in sides.values())
    return f"ours: {speed:.2f} x tokens a second, {first:.2f} x time to the first token"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    model = (
        "configs/diffusion-gemma-26b-fp8"
        if ON_GPU
        else "../vllm_diffusion/checkpoints/tiny_diffusion_gemma"
    )
    length = 1024 if ON_GPU else 64
    parser.add_argument("--model", type=Path, default=HERE / model)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument(
        "--concurrency", type=int, nargs="+", default=[1, 4, 8, 16, 32] if ON_GPU else [1, 2, 4]
    )
    parser.add_argument("--steps", type=int, default=16, help="denoising steps of a canvas")
    parser.add_argument("--input-len", type=int, nargs="+", default=[length], help="tokens")
    parser.add_argument("--output-len", type=int, default=length, help="tokens")
    parser.add_argument("--max-model-len", type=int, default=4096 if ON_GPU else 1024)
    parser.add_argument("--prompts", type=int, default=16 if ON_GPU else 4, help="at the least")
    parser.add_argument("--options", default="", help="further options of each server")
    parser.add_argument("--start-seconds", type=int, default=1800)
    parser.add_argument("--out", type=Path, help="folder for logs and results")
    parser.add_argument("--data", type=Path, help="file for the rows, as JSON lines")
    options = parser.parse_args(argv)
    options.out = options.out or Path(tempfile.mkdtemp())
    options.out.mkdir(parents=True, exist_ok=True)
    options.runs = [(length, n) for length in options.input_len for n in options.concurrency]
    data = DataFile(options.data)
    folder = options.out / "model"
    rows = []
    try:
        prepare(options.model, folder, options.steps)
        for side in options.sides:
            print(f"serving: {side}", file=sys.stderr)
            sweep(side, folder, options)
            log = (options.out / f"{side}.log").read_text(errors="replace")
            found = read(options.out, side, options.runs)
            rows += [row(side, run, found[run], options, log) for run in options.runs]
    except ValueError as error:
        sys.exit(str(error))
    print(device_name())
    for run in options.runs:
        some = [one for one in rows if (one["input"], one["requests"]) == run]
        for one in some:
            data.add("serving", **one)
            print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in one.items()))
        print(compared(some))
    print(f"logs and results: {options.out}")


if __name__ == "__main__":
    main()
