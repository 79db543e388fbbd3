"""Whether a step and attention, captured and replayed, give bit for bit what they give eagerly.

    python benchmarks/gpu/check_graphs.py             # the 26B shape
    python benchmarks/gpu/check_graphs.py --toy       # graphs emulated on a CPU

Some steps of 1 to 32 canvases run without graphs and then, from the same canvases, as graphs. All
state and all outputs are compared, and the time of both is told.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from attention_kernels.canvas_attention import AttentionOptions, canvas_attention
from attention_kernels.testing import make_canvas_batch
from vllm_diffusion.canvas.cuda_graphs import GraphedFunction, cuda_capture

# What it shares with the other benchmarks.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from data_file import DataFile
from plain_step import TOY, Server, Sizes
from timing import device, device_name, milliseconds

DEVICE = device()
STEPS = 4


def differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names of tensors of which any bit differs."""
    return [name for name, value in expected.items() if not torch.equal(value, found[name])]


def run_steps(server: Server, canvases: int, passes: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """State and outputs of some steps that begin with new canvases."""
    server.begin(canvases)
    found = {}
    for i, inputs in enumerate(passes):
        output = server.sampler.graphs.plain_step(*inputs)._asdict()
        found |= {f"{name} of step {i}": value.clone() for name, value in output.items()}
    return found | server.state()


def attention_replay(toy: bool, canvases: int) -> list[str]:
    """Attention of a graph's longest context, replayed for a shorter one."""
    shape = {"num_heads": 16, "num_kv_heads": 2, "head_dim": 512, "dtype": torch.bfloat16}
    canvas, longest, context = 256, 9000, 1500
    if toy:
        shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
        canvas, longest, context = 8, 40, 25
    batch = make_canvas_batch(
        [canvas] * canvases, [longest] * canvases, [0] * canvases, device=str(DEVICE), **shape
    )
    shorter = torch.full_like(batch.seq_lens, context + canvas)

    def attend(query: Tensor, seq_lens: Tensor) -> Tensor:
        changed = replace(batch, query=query, seq_lens=seq_lens)
        arguments = changed.arguments(
            AttentionOptions(0.1), max_query_len=canvas, max_seq_len=longest
        )
        return canvas_attention(*arguments, impl="triton")

    expected = attend(batch.query, shorter)
    graphed = GraphedFunction(attend)
    if DEVICE.type == "cuda":
        capture = cuda_capture()
    else:
        from tests.support.graphs import emulated_capture as capture
    graphed.capture(capture, batch.query.clone(), batch.seq_lens.clone())
    return differences({"attention": expected}, {"attention": graphed(batch.query, shorter)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--canvases", type=int, nargs="+", help="1, 2, 8 and 32; toy: 1 and 3")
    parser.add_argument("--data", type=Path, help="file for the rows, as JSON lines")
    options = parser.parse_args()
    data = DataFile(options.data)
    counts = options.canvases or ([1, 3] if options.toy else [1, 2, 8, 32])
    print(device_name())
    server = Server(TOY if options.toy else Sizes())
    on_gpu = DEVICE.type == "cuda"
    wrong = []

    def tell(what: str, canvases: int, differs: list[str], **times: float | None) -> None:
        state = f"differs in {', '.join(differs)}" if differs else "equal"
        print(f"{what}, {canvases} canvases: {state}; {times}", flush=True)
        data.add("graphs", what=what, canvases=canvases, state=state, **times)
        wrong.extend(differs)

    # Capturing needs a stream of its own.
    stream = torch.cuda.stream(torch.cuda.Stream()) if on_gpu else contextlib.nullcontext()
    with stream:
        passes = {n: [server.inputs(n) for _ in range(STEPS)] for n in counts}
        eager, eager_ms = {}, {}
        for n in counts:
            eager[n] = run_steps(server, n, passes[n])
            step = server.sampler.graphs.plain_step
            eager_ms[n] = milliseconds(lambda n=n, step=step: step(*passes[n][0]), repeats=5)[0]
        server.capture(max(counts))
        for n in counts:
            found = run_steps(server, n, passes[n])
            graph_ms = milliseconds(lambda n=n, step=step: step(*passes[n][0]), repeats=5)[0]
            times = {"ms_eager": round(eager_ms[n], 3), "ms_graph": round(graph_ms, 3)}
            tell("step", n, differences(eager[n], found), **(times if on_gpu else {}))
        for n in counts:
            tell("attention", n, attention_replay(options.toy, n))
    if wrong:
        print("a replay is not the eager call", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
