"""Checks that a step and attention give the same bits eagerly and replayed from CUDA graphs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attention_kernels.canvas_attention import Impl
from attention_kernels.checks import AttentionShape, Checked
from vllm_diffusion.canvas.cuda_graphs import Capture, GraphedFunction
from vllm_diffusion.kernel_choice.plain_step import StepServer
from vllm_diffusion.kernel_choice.step_shape import StepShape

STEPS = 3


def check_step_graph(shape: StepShape, device: torch.device, capture: Capture) -> Checked:
    """Compare some steps of one canvas and of all slots, eager and replayed, in all state and output.

    Args:
        shape: What is served.
        device: Where it runs.
        capture: Makes a graph of a call.

    Raises:
        AssertionError: Naming the tensors that differ.
    """
    server, canvases = StepServer(shape, device), shape.slots
    passes = {n: [server.inputs(n) for _ in range(STEPS)] for n in (1, canvases)}
    eager = {n: _run(server, n, inputs) for n, inputs in passes.items()}
    server.capture(capture, canvases)
    for n, inputs in passes.items():
        _assert_same_bits(eager[n], _run(server, n, inputs))
    step, first = server.sampler.graphs.plain_step, passes[canvases][0]
    num_bytes = 2 * shape.vocab * shape.hidden * torch.finfo(getattr(torch, shape.dtype)).bits // 8
    operations = 4 * len(first[0]) * shape.vocab * shape.hidden
    return Checked(0.0, lambda: step(*first), num_bytes, operations)


def _run(server: StepServer, canvases: int, passes: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Return state and outputs of some steps, from new canvases."""
    server.begin(canvases)
    found: dict[str, Tensor] = {}
    for i, inputs in enumerate(passes):
        output = server.sampler.graphs.plain_step(*inputs)._asdict()
        found |= {f"{name} of step {i}": value.clone() for name, value in output.items()}
    return found | server.state()


def check_attention_graph(
    shape: AttentionShape, impl: Impl, device: torch.device, capture: Capture
) -> Checked:
    """Compare attention of a graph that was captured for a long context with eager attention for a shorter one.

    Args:
        shape: Layer and pass, with the context of the graph.
        impl: Implementation.
        device: Where it runs.
        capture: Makes a graph of a call.

    Raises:
        AssertionError: If they differ in a bit.
    """
    batch = shape.batch(device)
    # A third of the context before the same queries.
    shorter = batch.seq_lens - 2 * shape.context // 3

    def attend(query: Tensor, seq_lens: Tensor) -> Tensor:
        return shape.call(replace(batch, query=query, seq_lens=seq_lens), impl)

    live = batch.num_live_tokens
    expected = attend(batch.query, shorter)[:live].clone()
    graphed = GraphedFunction(attend)
    graphed.capture(capture, batch.query.clone(), batch.seq_lens.clone())
    _assert_same_bits({"attention": expected}, {"attention": graphed(batch.query, shorter)[:live]})
    return Checked(0.0, lambda: graphed(batch.query, shorter), *shape.counts())


def _assert_same_bits(expected: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    differs = [name for name, value in expected.items() if not torch.equal(value, found[name])]
    assert not differs, f"differs in {', '.join(differs)}"
