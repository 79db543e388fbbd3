"""The process that times kernels: ``python -m vllm_diffusion.kernel_choice.timing DEVICE``.

It is asked like the process that checks them (``child.py``). A kernel is timed as the replay of a CUDA graph,
as it is served, and the graphs of a subject are kept, since its implementations are timed in turns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attention_kernels.checks import AttentionShape, Checked
from vllm_diffusion.canvas.cuda_graphs import cuda_capture
from vllm_diffusion.kernel_choice.cases import KernelCase
from vllm_diffusion.kernel_choice.child import serve
from vllm_diffusion.kernel_choice.plain_step import StepServer
from vllm_diffusion.kernel_choice.step_shape import StepShape

# (call, device) -> what runs it again.
Capture = Callable[[Callable[[], object], torch.device], Callable[[], object]]


def captured(call: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Return what replays a call as a CUDA graph."""
    with torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
        return cuda_capture()(call, ())


class Timer:
    """Replays of the subject that is timed."""

    def __init__(self, capture: Capture = captured) -> None:
        """Begin without any.

        Args:
            capture: Makes a graph of a call.
        """
        self._capture = capture
        self._subject = ""
        self._replays: dict[str, Callable[[], object]] = {}

    def __call__(
        self, case: KernelCase, device: torch.device, begins: Callable[[], None] = lambda: None
    ) -> Checked:
        """Return the replay of a case, for the clock; arguments as of ``run_case``."""
        begins()
        if case.subject != self._subject:
            self._replays.clear()
            self._subject = case.subject
        if case.key not in self._replays:
            self._replays[case.key] = self._capture(call_of(case, device), device)
        return Checked(0.0, self._replays[case.key], 0, 0)


def call_of(case: KernelCase, device: torch.device) -> Callable[[], object]:
    """Return what a case runs."""
    (shape,) = case.shapes
    if isinstance(shape, StepShape):
        return step_call(shape, device)
    assert isinstance(shape, AttentionShape)
    return attention_call(shape, case.impl, device)


def attention_call(shape: AttentionShape, impl: str, device: torch.device) -> Callable[[], Tensor]:
    """Return a call of one layer in one pass, whose bounds are those of its sequences."""
    batch = shape.batch(device)
    out = torch.empty_like(batch.query)
    return lambda: shape.call(batch, impl, out)  # type: ignore[arg-type]


def step_call(shape: StepShape, device: torch.device) -> Callable[[], object]:
    """Return a call of three steps of all slots: at first no row is certain of a token, then half, then all."""
    server = StepServer(shape, device)
    server.begin(shape.slots)
    steps = [server.inputs(shape.slots)[0] for _ in range(3)]
    for rows in (steps[1][::2], steps[2]):
        settle(rows, server.sampler.head.weight)
    return lambda: [server.sampler.graphs.plain_step(rows) for rows in steps]


def settle(rows: Tensor, weight: Tensor, logit: float = 90.0) -> None:
    """Make rows certain of a token each.

    Args:
        rows: [num_rows, hidden_size]; overwritten.
        weight: [num_ids, hidden_size], rows of the projection onto the vocabulary.
        logit: The token's logit, before a cap.
    """
    ids = torch.arange(len(rows), device=rows.device) * 7919 % len(weight)
    certain = weight[ids].float()
    rows.copy_(certain * (logit / certain.square().sum(dim=-1, keepdim=True)))


if __name__ == "__main__":
    serve(Timer())
