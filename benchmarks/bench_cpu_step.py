"""Where the time of a denoising step goes on the CPU platform.

Runs the shipped checkpoint through the real engine in this process and times its stages. Usage::

    python benchmarks/bench_cpu_step.py [--requests 1] [--steps 200]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

WARM_UP_STEPS = 20


class Stages:
    """Wall-clock seconds of named stages, summed over each engine step."""

    def __init__(self) -> None:
        self.current: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, float]] = []

    def wrap(self, owner: Any, name: str, stage: str) -> None:
        """Time every call of ``owner.name`` as ``stage``."""
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.current[stage] += time.perf_counter() - start

        setattr(owner, name, timed)

    def end_step(self, total: float) -> None:
        self.current["whole step"] = total
        self.steps.append(dict(self.current))
        self.current.clear()


def main() -> None:
    """Print the median of each stage in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1, help="running at once (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="timed steps (%(default)s)")
    arguments = parser.parse_args()

    import torch
    from vllm import LLM, SamplingParams, TokensPrompt

    from vllm_diffusion.cli.checkpoint import shipped_checkpoint

    start = time.perf_counter()
    llm = LLM(
        str(shipped_checkpoint()),
        max_model_len=4096,
        max_num_seqs=max(arguments.requests, 1),
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
    )
    print(f"engine ready after {time.perf_counter() - start:.1f} s")
    engine = llm.llm_engine
    core = engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner

    stages = Stages()
    stages.wrap(core.scheduler, "schedule", "scheduler: schedule")
    stages.wrap(core.scheduler, "update_from_output", "scheduler: results")
    stages.wrap(runner, "prepare_inputs", "runner: inputs")
    stages.wrap(runner, "prepare_attn", "runner: block tables")
    stages.wrap(runner.model_state, "prepare_attn", "state: attention metadata")
    stages.wrap(runner.model_state, "prepare_inputs", "state: embeddings, self-conditioning")
    stages.wrap(runner.model, "forward", "model: forward")
    stages.wrap(runner, "sample", "sampler: statistics")
    stages.wrap(runner.sampler.graphs, "_canvas_step", "sampler: decision")

    def keep_busy(index: int) -> None:
        # Answers of random tokens never converge, so every pass is a denoising step or an encode.
        engine.add_request(
            str(index),
            TokensPrompt(prompt_token_ids=[40 + (index * 7 + i) % 200 for i in range(64)]),
            SamplingParams(max_tokens=3000, ignore_eos=True, seed=index, temperature=1.5),
        )

    for index in range(arguments.requests):
        keep_busy(index)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    stages.steps.clear()
    stages.current.clear()
    for _ in range(arguments.steps):
        begin = time.perf_counter()
        engine.step()
        stages.end_step(time.perf_counter() - begin)

    print(
        f"{arguments.requests} request(s), {arguments.steps} steps, "
        f"{torch.get_num_threads()} torch thread(s), {os.cpu_count()} cores"
    )
    # The decision is part of what the sampler's stage measures.
    names = list(stages.steps[-1])
    for name in names:
        values = [1000 * step.get(name, 0.0) for step in stages.steps]
        spread = statistics.quantiles(values, n=10)
        print(
            f"{name:40s} median {statistics.median(values):7.2f} ms   "
            f"p10 {spread[0]:7.2f}   p90 {spread[-1]:7.2f}"
        )


if __name__ == "__main__":
    main()
