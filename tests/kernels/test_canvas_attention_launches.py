"""Tests of the launches of canvas_attention: tiles, splits and replays."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.canvas_attention import AttentionOptions, PagedCache, Sequences, Window
from attention_kernels.canvas_attention.triton import configs
from attention_kernels.canvas_attention.triton import launch as kernels
from attention_kernels.testing import assert_within_error_budget
from tests.support.counters.triton_compile import empty
from tests.support.oracles.canvas_attention import (
    DEVICE,
    SWEEP,
    arguments_of,
    attend,
    configured,
    expected,
    make_batch,
    nan_scratch,
)
from tests.support.oracles.kernel_checks import visibility_mask


def launched(batch, config, num_splits, **options):
    """Return the output of a launch, and how many key tiles it visited of each sequence."""
    visited, out = torch.zeros_like(batch.seq_lens), torch.zeros_like(batch.query)
    query, cache, sequences, options = arguments_of(**batch.tensors(), scale=0.2, **options)
    cut = kernels.Cut(config, num_splits, visited)
    kernels.CanvasLaunch(query, cache, sequences, options, cut)(query, cache, out)
    return out, visited


@pytest.mark.parametrize(
    ("num_splits", "left", "right", "anchor", "spans"),
    [
        pytest.param(1, -1, -1, "canvas", False, id="1-full"),
        pytest.param(1, 20, -1, "canvas", False, id="1-L20-canvas"),
        pytest.param(1, 20, 3, "query", False, id="1-L20-R3-query", marks=pytest.mark.slow),
        pytest.param(1, 5, -1, "canvas", True, id="1-L5-canvas-spans"),
        pytest.param(4, -1, -1, "canvas", False, id="4-full", marks=pytest.mark.slow),
        pytest.param(4, 20, -1, "canvas", False, id="4-L20-canvas", marks=pytest.mark.slow),
        pytest.param(4, 20, 3, "query", False, id="4-L20-R3-query", marks=pytest.mark.slow),
        pytest.param(4, 5, -1, "canvas", True, id="4-L5-canvas-spans", marks=pytest.mark.slow),
    ],
)
def test_canvas_attention_visited_tiles(num_splits, left, right, anchor, spans):
    """The kernel computes the key tiles that some row of a query tile sees, and no other."""
    query_lens, seq_lens, causal_rows = [40, 16, 24, 0, 9], [200, 150, 100, 60, 0], [40, 0, 9, 0, 9]
    row_spans = [(0, 0)] * 8 + [(165, 190)] * 22 + [(0, 0)] * 26 + [(60, 85)] * 9 + [(0, 0)] * 24
    batch = make_batch(
        query_lens, seq_lens, causal_rows, row_spans=row_spans if spans else None, padded_rows=4
    )
    config = kernels.TritonConfig(32, 16, 4, 1, parts=num_splits // 2 or 1)
    window = {"left": left, "right": right, "anchor": anchor}
    bounds = {"max_query_len": max(query_lens), "max_seq_len": max(seq_lens)}
    _, visited = launched(batch, config, num_splits, **window, **bounds)
    tokens_per_tile = 32 // 2  # two query heads share a key head
    starts = batch.query_start_loc.tolist()
    for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        mask = visibility_mask(
            query_len,
            seq_len,
            causal_rows[seq],
            Window(left, right, anchor),
            row_spans=batch.row_spans[starts[seq] : starts[seq + 1]] if spans else None,
            device=DEVICE,
        )
        tiles = [keys.any() for rows in mask.split(tokens_per_tile) for keys in rows.split(16, 1)]
        assert visited[seq] == sum(tiles) * 2, f"sequence {seq}"  # key heads


def test_canvas_attention_split_is_used():
    """Few rows with many keys run as several splits."""
    batch = make_batch([8], [300], [0])
    with (
        configured("triton-tiny"),
        mock.patch.object(kernels, "_scratch", side_effect=nan_scratch) as scratch,
    ):
        attend(**batch.tensors(), scale=0.2, impl="triton")
        assert scratch.call_count == 1
        attend(**batch.tensors(), scale=0.2, impl="triton", most_splits=1)
        assert scratch.call_count == 1


@st.composite
def short_replays(draw):
    """Draw canvases, and how a graph that was captured for longer ones cuts their keys."""
    canvases = draw(st.integers(1, 3))
    canvas = draw(st.sampled_from([1, 8, 13]))
    batch = make_batch(
        [canvas] * canvases,
        draw(st.lists(st.integers(canvas, 120), min_size=canvases, max_size=canvases)),
        [draw(st.sampled_from([0, canvas]))] * canvases,
        num_kv_heads=draw(st.sampled_from([1, 2])),
        head_dim=32,
        seed=draw(st.integers(0, 9)),
    )
    return batch, draw(st.integers(1, 8)), draw(st.sampled_from([-1, 20]))


@settings(SWEEP, max_examples=3)
@given(short_replays())
def test_canvas_attention_short_replay_of_a_long_graph(case):
    """A short context in a graph captured for a long one is right, and empty splits do nothing.

    It visits no more key tiles than without splits, however many were captured.
    """
    config = kernels.TritonConfig(16, 16, 4, 1)
    batch, num_splits, left = case
    options = {"left": left, "max_query_len": 16, "max_seq_len": 131072}
    with (
        mock.patch.object(kernels, "_scratch", nan_scratch),
        mock.patch.object(kernels, "MIN_SPLIT_KEYS", 32),
    ):
        out, visited = launched(batch, config, num_splits, **options)
        whole, visited_whole = launched(batch, config, 1, **options)
    assert torch.equal(visited, visited_whole)
    exact = expected(batch, torch.float64, scale=0.2, left=left)
    same = expected(batch, torch.float32, scale=0.2, left=left)
    assert_within_error_budget(out[: len(exact)], same, exact, "split", factor=4.0)
    if int(batch.seq_lens.max()) <= 32:
        # Too short to be cut: written as without splits.
        assert torch.equal(out, whole)


@pytest.mark.parametrize(
    ("canvases", "context", "window", "grid"),
    [
        pytest.param(1, 30, -1, (16, 4, 1), id="1-short-full"),
        pytest.param(1, 1024, -1, (16, 4, 2), id="1-1k-full"),
        pytest.param(1, 131072 - 256, -1, (16, 4, 2), id="1-128k-full"),
        pytest.param(2, 131072 - 256, -1, (33, 4, 1), id="2-128k-full"),
        pytest.param(4, 131072 - 256, -1, (67, 4, 1), id="4-128k-full"),
        pytest.param(1, 131072 - 256, 1023, (4, 8, 4), id="1-128k-sliding"),
        pytest.param(2, 131072 - 256, 1023, (9, 8, 2), id="2-128k-sliding"),
        pytest.param(8, 131072 - 256, 1023, (39, 8, 1), id="8-128k-sliding"),
    ],
)
def test_programs_of_a_launch(canvases, context, window, grid):
    """A launch has the expected query tiles, heads and splits for the 26B shape on an H100."""
    head_dim, num_kv_heads = (512, 2) if window < 0 else (256, 8)
    config = configs.tuned_config(head_dim, torch.bfloat16, torch.bfloat16, (9, 0))
    with mock.patch.object(kernels, "multiprocessors", return_value=132):
        cache = empty(4, 16, num_kv_heads, head_dim, dtype=torch.bfloat16)
        launch = kernels.CanvasLaunch(
            empty(canvases * 256, 16, head_dim, dtype=torch.bfloat16),
            PagedCache(cache, cache),
            Sequences(
                empty(canvases, 8192),
                empty(canvases + 1),
                empty(canvases),
                empty(canvases),
                max_query_len=256,
                max_seq_len=context + 256,
            ),
            AttentionOptions(0.1, window=Window(window)),
            kernels.Cut(config),
        )
    assert launch.grid == grid


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_canvas_attention_graph_replay():
    """A captured graph computes with the lengths and causal rows of its replay."""
    batch = make_batch([64, 64], [300, 5000], [0, 64], dtype=torch.bfloat16)
    out = torch.zeros_like(batch.query)
    arguments = {**batch.tensors(), "scale": 0.2, "impl": "triton"}
    bounds = {"max_query_len": 64, "max_seq_len": 5000}
    attend(**arguments, **bounds, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend(**arguments, **bounds, out=out)
    for causal_rows, seq_lens in [([64, 0], [300, 5000]), ([20, 1], [290, 64])]:
        batch.causal_rows.copy_(torch.tensor(causal_rows))
        batch.seq_lens.copy_(torch.tensor(seq_lens))
        graph.replay()
        assert torch.equal(out, attend(**arguments, **bounds))
