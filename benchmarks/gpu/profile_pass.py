"""Which kernels a pass spends its time in besides the backbone's products, by the profiler.

    python benchmarks/gpu/profile_pass.py             # the 26B shape, 1 and 8 canvases
    python benchmarks/gpu/profile_pass.py --toy

A pass here is a replay of the sampler's graph and the attention of 25 sliding and 5 full layers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from attention_kernels.canvas_attention import AttentionOptions, Window, canvas_attention
from attention_kernels.testing import make_canvas_batch
from tests.support.plain_step import StepServer, StepShape
from tests.support.specs import diffusion_gemma_spec

# What it shares with the other benchmarks.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from check_gpu import capture_of_device
from records import Rows, parser_of
from timing import device, place

DEVICE = device()
CONTEXT = 1300
MOST_KERNELS = 25


def attention(toy: bool, canvases: int) -> Callable[[], None]:
    """The calls of all layers."""
    layers = [(25, 16, 8, 256, 1023), (5, 16, 2, 512, -1)]
    canvas, context, dtype = 256, CONTEXT, torch.bfloat16
    if toy:
        layers, canvas, context, dtype = [(2, 2, 1, 32, 15)], 8, 20, torch.float32
    calls = []
    for count, num_heads, num_kv_heads, head_dim, window in layers:
        batch = make_canvas_batch(
            [canvas] * canvases,
            [context + canvas] * canvases,
            [0] * canvases,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=dtype,
            device=str(DEVICE),
        )
        out = torch.empty_like(batch.query)
        arguments = batch.arguments(
            AttentionOptions(head_dim**-0.5, window=Window(window)),
            max_query_len=canvas,
            max_seq_len=context + canvas,
        )
        calls += [lambda a=arguments, out=out: canvas_attention(*a, out=out, impl="triton")] * count

    def all_layers() -> None:
        for call in calls:
            call()

    return all_layers


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--toy", action="store_true")
    options = parser.parse_args()
    data = Rows(options.data)
    print(place())
    on_gpu = DEVICE.type == "cuda"
    counts = [1] if options.toy else [1, 8]
    toy = StepShape(diffusion_gemma_spec(8), vocab=300, hidden=16, slots=4, dtype="float32")
    server = StepServer(toy if options.toy else StepShape(compiler="inductor"), DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext():
        passes = {n: server.inputs(n) for n in counts}
        server.capture(capture_of_device(), max(counts))
        for n in counts:
            server.begin(n)
            layers = attention(options.toy, n)
            parts = {
                "sampler": lambda n=n: server.sampler.graphs.plain_step(*passes[n]),
                "attention": layers,
            }
            for part, call in parts.items():
                call()
                activities = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
                with profile(activities=activities) as profiler:
                    call()
                    if on_gpu:
                        torch.cuda.synchronize()
                report(profiler, part, n, data)
    return 0


def report(profiler: profile, part: str, canvases: int, data: Rows) -> None:
    """The longest kernels of a part of the pass."""
    on_gpu = DEVICE.type == "cuda"
    events = profiler.key_averages()
    time = {e: e.self_device_time_total if on_gpu else e.self_cpu_time_total for e in events}
    total, launches = sum(time.values()), sum(event.count for event in events)
    data.add("pass", part=part, canvases=canvases, calls=launches, us=round(total, 1))
    for event in sorted(events, key=time.__getitem__, reverse=True)[:MOST_KERNELS]:
        data.add(
            "kernels of a pass",
            part=part,
            canvases=canvases,
            kernel=event.key[:100],
            calls=event.count,
            us=round(time[event], 1),
            share=round(time[event] / total, 4) if total else 0.0,
        )


if __name__ == "__main__":
    sys.exit(main())
