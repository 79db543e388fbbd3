"""Tests of which passes are captured, and of what a replay reads and returns."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.doubles.graphs import emulated_capture
from tests.support.engines.vllm_configs import vllm_config
from vllm_diffusion.startup.cuda_graphs import (
    TILE_ROWS,
    GraphedFunction,
    capture_sizes,
    choose_capture_sizes,
    most_canvases,
)


@given(canvas=st.integers(1, 512), seqs=st.integers(1, 300), budget=st.integers(1024, 65536))
def test_every_pass_of_whole_canvases_has_a_size(canvas, seqs, budget):
    """Every pass fits a captured size, and is padded only above 16 canvases."""
    sizes = capture_sizes(canvas, seqs, budget)
    assert sizes == sorted(set(sizes))
    assert all(size % canvas == 0 and size <= budget for size in sizes)
    for n in range(1, min(2 * seqs, most_canvases(canvas), sizes[-1] // canvas) + 1):
        smallest = next(size for size in sizes if size >= n * canvas) // canvas
        assert smallest == n or (n > 16 and (smallest - n) * canvas < max(2 * canvas, TILE_ROWS))


@pytest.mark.parametrize(("canvas", "canvases"), [(256, 64), (32, 128), (4, 1024)])
def test_short_canvases_have_graphs_of_more(canvas, canvases):
    """A pass of short canvases has a graph up to 4,096 rows, where launches would take longest."""
    assert capture_sizes(canvas, 2048, 2**17)[-1] == canvases * canvas


@pytest.mark.parametrize(
    ("sizes", "largest", "on_cpu", "expected"),
    [
        (None, None, False, [32, 64, 96, 128]),
        ([8, 16], None, False, [8, 16]),
        (None, 2048, False, None),
        (None, None, True, None),
    ],
    ids=["chosen", "sizes of the operator", "ceiling of the operator", "no GPU"],
)
def test_choose_capture_sizes(monkeypatch, sizes, largest, on_cpu, expected):
    """Capture sizes that the operator sets are left unchanged."""
    from vllm.platforms import current_platform

    config = vllm_config(max_num_seqs=2)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: on_cpu)
    compilation = config.compilation_config
    compilation.cudagraph_capture_sizes = sizes
    compilation.max_cudagraph_capture_size = largest
    assert choose_capture_sizes(compilation, config.scheduler_config, 32) == expected


def test_a_replay_reads_this_call_s_inputs():
    """A replay reads the inputs of its own call, and other shapes run without a graph."""
    calls = []

    def double(x):
        calls.append(x.shape[0])
        return x * 2

    graphed = GraphedFunction(double)
    graphed.capture(emulated_capture, torch.zeros(3))
    held = graphed(torch.tensor([1.0, 2.0, 3.0]))
    assert held.tolist() == [2.0, 4.0, 6.0]
    assert graphed(torch.tensor([5.0, 6.0, 7.0])) is held
    assert held.tolist() == [10.0, 12.0, 14.0]
    assert graphed(torch.ones(2)).tolist() == [2.0, 2.0]
    assert calls == [3, 3, 3, 2]
