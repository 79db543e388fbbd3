"""What filters and log-probabilities add to a pass of the shipped checkpoint, on a CPU.

    python benchmarks/bench_settings.py
    python benchmarks/bench_settings.py --requests 1 --rounds 9

The same requests run in one engine with each setting and without any, in turns, eight steps a
canvas, so that all passes have the same rows. Each time is the process's own for a pass; the ratio
to the plain pass is of the same round.
"""

import os
import random
import statistics
import time
from typing import Any

from records import Rows, parser_of

# As many steps as a canvas would have to be stable for.
STEPS = {"diffusion_max_steps": 8, "diffusion_stability_threshold": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "top_k and top_p": {"top_k": 20, "top_p": 0.9},
    "logprobs": {"logprobs": 5},
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8], help="at once")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    from vllm import LLM, SamplingParams

    from tests.support.counters.row_counts import RowCounter, RowCounts
    from vllm_diffusion.checkpoints import shipped_checkpoint

    llm = LLM(
        str(shipped_checkpoint()),
        max_model_len=1024,
        max_num_seqs=max(args.requests),
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**28,
    )
    counter, drawn, data = RowCounter(llm), random.Random(0), Rows(args.data)
    prompts = [
        {"prompt_token_ids": drawn.choices(range(60, 300), k=100)}
        for _ in range(max(args.requests))
    ]

    def milliseconds_a_pass(requests: int, settings: dict[str, Any]) -> float:
        common = {"temperature": 0.8, "max_tokens": 64, "ignore_eos": True, "extra_args": STEPS}
        params = [SamplingParams(seed=i, **common, **settings) for i in range(requests)]
        counter.counts = RowCounts()
        began = time.process_time()
        llm.generate(prompts[:requests], params, use_tqdm=False)
        return 1e3 * (time.process_time() - began) / counter.counts.passes

    for requests in args.requests:
        found: dict[str, list[float]] = {name: [] for name in SETTINGS}
        for _ in range(args.rounds + 1):
            for name, settings in SETTINGS.items():
                found[name].append(milliseconds_a_pass(requests, settings))
        for name, times in found.items():
            # The first round compiled what it needed.
            ratios = [
                time / plain for time, plain in zip(times[1:], found["none"][1:], strict=True)
            ]
            data.add(
                "settings",
                requests=requests,
                setting=name,
                ms=round(statistics.median(times[1:]), 1),
                ratio=round(statistics.median(ratios), 2),
            )


if __name__ == "__main__":
    main()
