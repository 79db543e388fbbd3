"""Where the time of a denoising step goes on the CPU platform.

    python benchmarks/bench_cpu_step.py [--requests 1] [--steps 200]

Runs the shipped checkpoint through the real engine in this process, and times its stages, each
without the stages inside it.
"""

from __future__ import annotations

import os
import statistics

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from records import Rows, parser_of
from stages import Stages

WARM_UP_STEPS = 20


def main() -> None:
    """Print milliseconds of each stage: median, first and last decile of the steps."""
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, default=1, help="running at once (%(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="timed steps (%(default)s)")
    arguments = parser.parse_args()

    import torch
    from vllm import LLM, SamplingParams, TokensPrompt

    from vllm_diffusion.checkpoints import shipped_checkpoint

    llm = LLM(
        str(shipped_checkpoint()),
        max_model_len=4096,
        max_num_seqs=max(arguments.requests, 1),
        limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0},
    )
    engine = llm.llm_engine
    # At which no token is likely: each canvas takes all its steps, and no answer ends while steps
    # are timed.
    hot = {"diffusion_t_max": 20.0, "diffusion_t_min": 20.0}
    for index in range(arguments.requests):
        engine.add_request(
            str(index),
            TokensPrompt(prompt_token_ids=[40 + (index * 7 + i) % 200 for i in range(64)]),
            SamplingParams(max_tokens=3000, ignore_eos=True, seed=index, extra_args=hot),
        )
    for _ in range(WARM_UP_STEPS):
        engine.step()
    stages = Stages.of(llm)
    steps = []
    for _ in range(arguments.steps):
        engine.step()
        found = stages.take()
        steps.append({"whole step": sum(found.values()), **found})
    assert engine.get_num_unfinished_requests() == arguments.requests

    data = Rows(arguments.data)
    given = {"requests": arguments.requests, "threads": torch.get_num_threads()}
    for stage in steps[-1]:
        deciles = statistics.quantiles([1e3 * step.get(stage, 0.0) for step in steps], n=10)
        ms = {name: round(deciles[i], 2) for name, i in (("p10", 0), ("median", 4), ("p90", 8))}
        data.add("milliseconds of a step", **given, stage=stage, **ms)


if __name__ == "__main__":
    main()
