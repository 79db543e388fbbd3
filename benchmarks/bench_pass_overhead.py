"""What a pass launches and copies besides the backbone, and what the host takes: ours and stock's class.

    python benchmarks/bench_pass_overhead.py --data overhead.jsonl

Both serve a DiffusionGemma without trained weights, in an engine on this machine's CPU, with the six
groups of KV caches of the 26B checkpoint. What is counted, and as what, is in ``pass_launches.py``. Ours
has its graphs, captured as a GPU's would be and replayed by calling what was captured; stock's class has
none of its own, and its compiled function and its kernel count as on a GPU. Passes are those in which
every request denoises or encodes its canvas. Left out on both sides: the backbone, what the runner does
for any model, and attention's metadata of stock, which is our back end's here and not on a GPU.

The host's time is that of the same calls without counting: what is in a graph, in a compiled function or
in a kernel is computed as well, and its time, in which a GPU's host would go on, is left out. Every other
operation is in it with what it computes here, which is little: canvases are short and embeddings small.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from data_file import DataFile

SIDES = {"ours": "vllm_diffusion_cpu,vllm_diffusion", "stock": "vllm_diffusion_cpu"}
REQUESTS = (1, 4, 8)
# Two of five sliding layers to a full one, in groups of two: as many groups as 25 and 5 make.
LAYERS = (["sliding_attention"] * 5 + ["full_attention"]) * 2
WARM_UP, PASSES, CLOCKED_PASSES = 4, 8, 60
# So short that an operation takes what launching it takes.
CLOCKED_CANVAS = 4


def checkpoint(folder: Path, canvas_length: int | None = None) -> Path:
    """The shipped checkpoint's configuration with the 26B's groups of layers, and no weights.

    Args:
        folder: Where it is written.
        canvas_length: Other than the shipped checkpoint's.
    """
    from vllm_diffusion.cli.checkpoint import shipped_checkpoint

    shutil.copytree(
        shipped_checkpoint(),
        folder,
        dirs_exist_ok=True,
        ignore=shutil.ignore_patterns("*.safetensors*"),
    )
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= {"num_hidden_layers": len(LAYERS), "layer_types": LAYERS}
    config["canvas_length"] = canvas_length or config["canvas_length"]
    path.write_text(json.dumps(config))
    return folder


def engine_of(folder: Path) -> Any:
    from vllm import LLM

    return LLM(
        str(folder),
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=max(REQUESTS),
        enforce_eager=True,
        kv_cache_memory_bytes=64 * 1024**2,
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
    )


def runner_of(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


@contextlib.contextmanager
def counting_compiled(side: str, launches: Any) -> Iterator[None]:
    """Engines that are made meanwhile have compiled functions that count as a GPU's."""
    with contextlib.ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        if side == "ours":
            from vllm_diffusion.canvas import pass_rows, step
            from vllm_diffusion.runner import model_state as base

            for module in (pass_rows, step):
                replace(module, "compiled", launches.compile)
            for name in ("compile_backend", "launch_backend"):
                replace(base, name, mock.Mock(return_value="inductor"))
        else:
            from vllm.model_executor.models import diffusion_gemma

            from vllm_diffusion.attention.metadata import CanvasAttentionMetadataBuilder

            function = inspect.unwrap(diffusion_gemma._compiled_sample_step)
            function = getattr(function, "_torchdynamo_orig_callable", function)
            replace(diffusion_gemma, "_compiled_sample_step", launches.compile(function))
            for name in ("sample_row_stats", "sample_row_stats_reference"):
                kernel = launches.as_one(getattr(diffusion_gemma, name), "kernel of statistics")
                replace(diffusion_gemma, name, kernel)
            build = CanvasAttentionMetadataBuilder.build
            uncounted = launches.as_one(build, "attention's metadata", 0)
            replace(CanvasAttentionMetadataBuilder, "build", lambda *a, **k: uncounted(*a, **k))
        yield


def watch(side: str, launches: Any, runner: Any) -> None:
    """Capture ours, and watch what both add to a pass."""
    import torch

    state = runner.model_state
    if side == "ours":
        with torch.inference_mode():
            state.capture_graphs(launches.capture, max(REQUESTS))
    for owner, name in watched_calls(runner):
        launches.watch(owner, name)


def watched_calls(runner: Any) -> list[tuple[Any, str]]:
    """What a model's state and its sampler add to a pass."""
    names = ("apply_staged_writes", "preprocess_state", "prepare_attn", "prepare_inputs_embeds")
    of_state = [
        (runner.model_state, name) for name in (*names, "prepare_inputs", "postprocess_state")
    ]
    return [*of_state, (runner.sampler, "apply_staged_writes"), (runner, "sample")]


class Requests:
    """Some that denoise all the while, since their answers are noise."""

    def __init__(self, llm: Any, params: list[dict[str, Any]]) -> None:
        from vllm import SamplingParams, TokensPrompt

        self._engine = llm.llm_engine
        for index, changes in enumerate(params):
            prompt = [40 + (index * 7 + i) % 200 for i in range(20)]
            # Stock's class takes neither a seed nor a temperature.
            options = {"max_tokens": 900, "ignore_eos": True}
            self._engine.add_request(
                f"{time.monotonic_ns()}",
                TokensPrompt(prompt_token_ids=prompt),
                SamplingParams(**(options | changes)),
            )

    def step(self, passes: int = 1) -> None:
        """Run so many passes."""
        for _ in range(passes):
            self._engine.step()

    def end(self) -> None:
        """Abort all."""
        ids = list(self._engine.output_processor.request_states)
        self._engine.abort_request(ids, internal=True)
        while self._engine.has_unfinished_requests():
            self._engine.step()


def counted(llm: Any, launches: Any, params: list[dict[str, Any]]) -> list[dict[str, int]]:
    """Launches of each of ``PASSES`` passes, by what they are, once prompts are over."""
    with launches.installed():
        requests = Requests(llm, params)
        requests.step(WARM_UP)
        launches.end_pass()
        found = []
        for _ in range(PASSES):
            requests.step()
            found.append(dict(launches.end_pass()))
        requests.end()
        launches.end_pass()
    return found


def count(side: str, llm_of: Callable[[], Any]) -> dict[str, dict[str, Any]]:
    """By number of requests, the launches of the pass that has most of them."""
    from pass_launches import COPY, PassLaunches

    launches = PassLaunches()
    with counting_compiled(side, launches):
        llm = llm_of()
        watch(side, launches, runner_of(llm))
        found = {}
        for n in REQUESTS:
            most = max(counted(llm, launches, [{}] * n), key=lambda counts: sum(counts.values()))
            num_copies = most.get(COPY, 0)
            launched = sum(most.values()) - num_copies
            found[str(n)] = {"launches": launched, "copies": num_copies, "what": most}
    return found


def clock(side: str, llm_of: Callable[[], Any]) -> dict[str, dict[str, Any]]:
    """By number of requests, the host's microseconds in the same calls, in the median."""
    from pass_launches import HostClock

    host = HostClock()
    with counting_compiled(side, host):
        llm = llm_of()
        watch(side, host, runner_of(llm))
        found = {}
        for n in REQUESTS:
            requests = Requests(llm, [{}] * n)
            requests.step(WARM_UP)
            times = []
            for _ in range(CLOCKED_PASSES):
                host.end_pass()
                requests.step()
                times.append(host.end_pass())
            requests.end()
            found[str(n)] = {"host_us": round(1e6 * statistics.median(times))}
    return found


def measured(side: str, what: str) -> dict[str, dict[str, Any]]:
    """By number of requests, in a process of its own, in which the side serves.

    Args:
        side: One of ``SIDES``.
        what: ``"count"`` or ``"clock"``.
    """
    environment = os.environ | {
        "VLLM_PLUGINS": SIDES[side],
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "TRITON_INTERPRET": "1",
    }
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        subprocess.run(
            [sys.executable, __file__, "--side", side, "--what", what, "--result", result.name],
            env=environment,
            check=True,
        )
        found: dict[str, dict[str, Any]] = json.load(result)
    return found


def overhead(side: str) -> dict[str, dict[str, Any]]:
    """By number of requests, what is counted and clocked of a side."""
    counts, times = measured(side, "count"), measured(side, "clock")
    return {n: counts[n] | times[n] for n in counts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="file for the rows, as JSON lines")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--what", choices=("count", "clock"), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        measure = count if options.what == "count" else clock
        with tempfile.TemporaryDirectory() as folder:
            short = CLOCKED_CANVAS if options.what == "clock" else None
            made = checkpoint(Path(folder), short)
            options.result.write_text(json.dumps(measure(options.side, lambda: engine_of(made))))
        return 0
    data = DataFile(options.data)
    print("| requests | | launches | copies to the device | host, microseconds |")
    print("|---|---|---|---|---|")
    sides = {side: overhead(side) for side in SIDES}
    for n in map(str, REQUESTS):
        for side, rows in sides.items():
            row = rows[n]
            print(f"| {n} | {side} | {row['launches']} | {row['copies']} | {row['host_us']} |")
            data.add("overhead of a pass", side=side, requests=int(n), **row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
