"""List every kernel of a steady pass of the 26B shape in the engine that serves, by PyTorch's
profiler.

    python benchmarks/gpu/profile_serving.py --requests 1 8 32
    python benchmarks/gpu/profile_serving.py --requests 1 8 --moe humming --humming-input fp8

A pass is timed without the profiler first: ``idle_ms`` is what its kernels leave of that. Weights
are random. Without a GPU the shipped checkpoint runs on the CPU, whose operators are listed, which
shows that the script works.
"""

import re
import time
from collections import defaultdict

import torch
from backends import ON_GPU, add_options, named, start
from records import Rows, parser_of
from timing import place
from torch.profiler import ProfilerActivity, profile

# More than the passes that are looked at: no canvas ends in between.
STEPS = 48
WARM_UP, PASSES = (12, 6) if ON_GPU else (2, 2)
# Tokens of a prompt.
CONTEXT = 4096 if ON_GPU else 40
# Part of a pass -> names of its kernels; the first that is found counts.
PARTS = {
    "attention": r"canvas_attention|combine_kernel|flash|cute",
    "statistics": r"_update_statistics",
    "experts' product": r"GroupProblemShape|PtrArray|fused_moe_kernel|humming",
    "head or BF16 product": r"nvjet|gemm.*bf16|s16816|h16816|cublas",
    "FP8 product": r"GemmUniversal",
    "experts' rows": r"expandInput|finalizeMoe|DeviceRadix|moe_|rout|get_group|problem_sizes",
    "quantisation": r"scaled_fp8_quant|dynamic_per_token",
    "activation": r"act_and_mul",
    "cache": r"reshape_and_cache|kv_cache",
    "Inductor": r"^triton_",
}


def part_of(kernel: str) -> str:
    """Return the part of a pass that a kernel belongs to."""
    return next((name for name, found in PARTS.items() if re.search(found, kernel)), "other")


def main() -> None:
    parser = parser_of(__doc__)
    add_options(parser)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32] if ON_GPU else [1])
    options = parser.parse_args()
    data = Rows(options.data)
    from vllm import SamplingParams

    sizes = {"max_model_len": 512}
    if ON_GPU:
        # Room for prompts beside all canvases: a steady pass has none of it.
        sizes = {"max_model_len": 6144, "max_num_batched_tokens": 16384}
    most = max(options.requests)
    llm = start(options, STEPS, max_num_seqs=most, enable_prefix_caching=False, **sizes)
    engine = llm.llm_engine
    print(place("humming-kernels"))
    for n in options.requests:
        ids = [f"{n} {i}" for i in range(n)]
        for i, request_id in enumerate(ids):
            tokens = [20 + (7 * i + j) % 200 for j in range(CONTEXT)]
            params = SamplingParams(max_tokens=1024 if ON_GPU else 256, ignore_eos=True, seed=i)
            engine.add_request(request_id, {"prompt_token_ids": tokens}, params)
        for _ in range(WARM_UP + CONTEXT * n // 8192 + 1):
            engine.step()
        plain = seconds_of(engine)
        with profile(
            activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]
        ) as seen:
            seconds_of(engine)
        columns = {**named(options), "requests": n}
        parts: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
        for event in seen.key_averages():
            spent = event.self_device_time_total if ON_GPU else event.self_cpu_time_total
            if not spent:
                continue
            part, calls, us = part_of(event.key), event.count / PASSES, spent / PASSES
            parts[part][0] += calls
            parts[part][1] += us
            one = {"part": part, "kernel": event.key[:160], "calls": calls, "us": round(us, 1)}
            data.add("kernels of a pass", **columns, **one)
        for part, (calls, us) in parts.items():
            data.add("parts of a pass", **columns, part=part, calls=calls, us=round(us, 1))
        ms, busy = plain / PASSES * 1e3, sum(us for _, us in parts.values()) / 1e3
        times = {"ms": round(ms, 3), "busy_ms": round(busy, 3), "idle_ms": round(ms - busy, 3)}
        data.add("passes", **columns, **times)
        engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()


def seconds_of(engine: object) -> float:
    """Run the passes, and return their time with the device's end."""
    began = time.perf_counter()
    for _ in range(PASSES):
        engine.step()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
