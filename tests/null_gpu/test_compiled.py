"""Inductor's kernels for a GPU, interpreted on the null GPU's memory, equal eager functions.

With PyTorch 2.11, a search in a slice was compiled as one in the whole tensor; each row then had
the next request's tokens, and only a GPU showed it.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.models.specs import diffusion_gemma_spec, masked_spec
from tests.support.null_gpu import true_values
from tests.support.null_gpu.processes import NullGpu
from tests.unit.canvas import test_pass_rows, test_step
from vllm_diffusion.canvas.pass_rows import PassRows
from vllm_diffusion.canvas.slots import CanvasSlots
from vllm_diffusion.canvas.step import StepOutput
from vllm_diffusion.decoding import layouts

CPU, GPU = torch.device("cpu"), torch.device("cuda")
PASSES = 6


def compare_rows(layout: str) -> list[str]:
    """Return the parts of :class:`PassRows` that differ from the eager functions of a CPU."""
    true_values.compute()
    spec = test_pass_rows.spec_of(getattr(layouts, layout))
    return [
        name
        for one, other in zip(rows(spec, CPU, None), rows(spec, GPU, "inductor"), strict=True)
        for name in one
        if one[name] != other[name]
    ]


def rows(spec: Any, device: torch.device, backend: str | None) -> list[dict[str, Any]]:
    """Return what passes of random requests lay out, fill in and hand to the engine."""
    R, C, N = test_pass_rows.SLOTS, test_pass_rows.LENGTH, test_pass_rows.ROWS
    slots = CanvasSlots(R, spec, 40, device)
    slots.canvas.copy_(torch.arange(R * C).view(R, C))
    pass_rows = PassRows(slots, N, backend)
    known = (torch.arange(R * 30, dtype=torch.int32).view(R, 30) + 100).to(device)
    done = torch.arange(R, device=device)
    draw, found = random.Random(0), []
    for _ in range(PASSES):
        chosen = [
            (draw.randint(0, 4), draw.randint(1, C), draw.randint(0, 9), draw.randint(1, 12))
            for _ in range(draw.randint(1, R))
        ]
        batch = test_pass_rows.batch_of(chosen, draw.sample(range(R), R))
        ids = (torch.arange(N, dtype=torch.int32) + 5000).to(device)
        batch.input_ids = ids[: batch.num_tokens]
        pass_rows.lay_out(batch)
        pass_rows.fill_ids(batch, known, torch.zeros_like(done, dtype=torch.int32))
        output = StepOutput(slots.canvas, done, done.to(torch.int32), *[None] * 7)
        n = pass_rows.num_rows
        found.append(
            {
                "ids": ids.tolist(),
                "index": pass_rows.index[:n].tolist(),
                "hidden_index": pass_rows.hidden_index[:n].tolist(),
                "slot": pass_rows.slot[:n].tolist(),
                "position": pass_rows.position[:n].tolist(),
                "offset": pass_rows.offset[:n].tolist(),
                "causal rows": pass_rows.num_causal.tolist(),
                "causal flags": pass_rows.causal_flags.tolist(),
                "of the engine": [each.tolist() for each in pass_rows.for_engine(output)],
            }
        )
    return found


def compare_steps(is_masked: bool) -> list[int]:
    """Return the steps whose canvases or emitted tokens differ from the CPU's eager step."""
    true_values.compute()
    C = test_step.CANVAS
    spec = masked_spec(C) if is_masked else diffusion_gemma_spec(C, 4)
    canvases, emitted = test_step.run("inductor", spec, GPU)
    expected, counts = test_step.run(None, spec)
    assert sum(counts) > 0
    return [
        i
        for i, (one, other) in enumerate(zip(canvases, expected, strict=True))
        if not torch.equal(one, other) or emitted[i] != counts[i]
    ]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NullGpu]:
    """A null GPU that computes, of a capability for which vLLM has no CuTe kernels."""
    folder = tmp_path_factory.mktemp("compiled")
    with NullGpu(folder, imports="torch", capability="8.0", interprets=True) as running:
        yield running


@pytest.mark.parametrize(
    "layout",
    [
        "FreeCanvas",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("AlignedBlock", "ShiftedBlock", "VerifiedDraft")
        ),
    ],
)
def test_rows(gpu, layout):
    """Compiled functions lay out the rows that the eager ones do, for each layout."""
    found = gpu.run(f"{__name__}:compare_rows", capability="8.0", layout=layout)
    assert found.checked() == []


@pytest.mark.parametrize("is_masked", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_steps(gpu, is_masked):
    """A compiled step gives the canvases and tokens of the eager one."""
    found = gpu.run(f"{__name__}:compare_steps", capability="8.0", is_masked=is_masked)
    assert found.checked() == []
