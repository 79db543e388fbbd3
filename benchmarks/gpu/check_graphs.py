"""Whether a step and attention, captured and replayed, give bit for bit what they give eagerly.

    python benchmarks/gpu/check_graphs.py             # the 26B shape
    python benchmarks/gpu/check_graphs.py --toy       # graphs emulated on a CPU

Some steps of 1 to 32 canvases run without graphs and then, from the same canvases, as graphs. All
state and all outputs are compared, and the time of both is reported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from checks import Checks, run_checks
from plain_step import TOY, Server, Sizes, capture_of, own_stream
from timing import device, milliseconds
from torch import Tensor

from attention_kernels.canvas_attention import AttentionOptions, canvas_attention
from attention_kernels.testing import make_canvas_batch
from vllm_diffusion.canvas.cuda_graphs import GraphedFunction

DEVICE = device()
STEPS = 4


def assert_same_bits(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    """Every tensor of one call equals the other's."""
    differs = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    assert not differs, f"differs in {', '.join(differs)}"


class Steps:
    """Some steps of one number of canvases, run eagerly before graphs are captured."""

    def __init__(self, server: Server, canvases: int) -> None:
        self._server, self._canvases = server, canvases
        self._passes = [server.inputs(canvases) for _ in range(STEPS)]
        self._eager, self._eager_ms = self._run()

    def _run(self) -> tuple[dict[str, Tensor], float]:
        """State and outputs of the steps, from new canvases; and milliseconds of a step."""
        self._server.begin(self._canvases)
        step = self._server.sampler.graphs.plain_step
        found = {}
        for i, inputs in enumerate(self._passes):
            output = step(*inputs)._asdict()
            found |= {f"{name} of step {i}": value.clone() for name, value in output.items()}
        found |= self._server.state()
        return found, milliseconds(lambda: step(*self._passes[0]), repeats=5)[0]

    def check(self) -> str:
        """The same, replayed."""
        with own_stream():
            found, graph_ms = self._run()
        assert_same_bits(self._eager, found)
        return f"{self._eager_ms:.3f} ms eager, {graph_ms:.3f} ms replayed"


def attention_replay(toy: bool, canvases: int) -> str:
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

    with own_stream():
        expected = attend(batch.query, shorter)
        graphed = GraphedFunction(attend)
        graphed.capture(capture_of(DEVICE), batch.query.clone(), batch.seq_lens.clone())
        assert_same_bits({"attention": expected}, {"attention": graphed(batch.query, shorter)})
    return "equal"


def checks(toy: bool) -> Checks:
    """Steps and attention of each number of canvases."""
    counts = [1, 3] if toy else [1, 2, 8, 32]
    server = Server(TOY if toy else Sizes())
    with own_stream():
        steps = {n: Steps(server, n) for n in counts}
        server.capture(max(counts))
    found: dict[str, Callable[[], str]] = {f"step, canvases: {n}": steps[n].check for n in counts}
    for n in counts:
        found[f"attention, canvases: {n}"] = lambda n=n: attention_replay(toy, n)
    return found


if __name__ == "__main__":
    sys.exit(run_checks("graphs", __doc__, checks))
