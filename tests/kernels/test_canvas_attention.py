"""canvas_attention against an independent fp64 computation."""

import contextlib
import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_kernels.canvas_attention import canvas_attention, plan_canvas_attention
from attention_kernels.canvas_attention.reference import visibility_mask
from attention_kernels.testing import (
    CanvasBatch,
    assert_within_error_budget,
    make_canvas_batch,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
make_batch = functools.partial(make_canvas_batch, device=DEVICE)
BATCH_TENSORS = ("block_table", "query_start_loc", "seq_lens", "causal_rows")

# "triton-tiny" cuts small inputs into many tiles, several splits and parts of values.
IMPLS = ["reference", "triton", "triton-tiny"]


def sees(p, j, *, seq_len, canvas_start, window_left, window_right, anchor, span):
    """DESIGN's rule for one query position and one key, term by term."""
    if not 0 <= j <= seq_len - 1:
        return False
    if p < canvas_start:
        in_window = j <= p and (window_left < 0 or j >= p - window_left)
        return in_window or span[0] <= j < span[1]
    if anchor == "canvas":
        return window_left < 0 or j >= canvas_start - window_left
    return (window_left < 0 or j >= p - window_left) and (window_right < 0 or j <= p + window_right)


def expected(
    batch: CanvasBatch,
    dtype: torch.dtype,
    *,
    scale,
    softcap=0.0,
    left=-1,
    right=-1,
    anchor="canvas",
    key_scale=1.0,
    value_scale=1.0,
) -> Tensor:
    """Attention of the live rows in ``dtype``, one sequence and one mask element after the other."""
    batch = CanvasBatch(**{k: t if t is None else t.cpu() for k, t in batch.tensors().items()})
    out = torch.zeros(batch.num_live_tokens, *batch.query.shape[1:], dtype=dtype)
    block_size = batch.key_cache.shape[1]
    groups = batch.query.shape[1] // batch.key_cache.shape[2]
    starts = batch.query_start_loc.tolist()
    for seq, (seq_len, causal) in enumerate(
        zip(batch.seq_lens.tolist(), batch.causal_rows.tolist(), strict=True)
    ):
        query_len = starts[seq + 1] - starts[seq]
        if query_len == 0 or seq_len == 0:
            continue
        slots = [
            (int(batch.block_table[seq, j // block_size]), j % block_size) for j in range(seq_len)
        ]
        key = torch.stack([batch.key_cache[slot].to(dtype) for slot in slots]) * key_scale
        value = torch.stack([batch.value_cache[slot].to(dtype) for slot in slots]) * value_scale
        first = seq_len - query_len
        mask = torch.tensor(
            [
                [
                    sees(
                        first + r,
                        j,
                        seq_len=seq_len,
                        canvas_start=first + causal,
                        window_left=left,
                        window_right=right,
                        anchor=anchor,
                        span=(0, 0)
                        if batch.row_spans is None
                        else batch.row_spans[starts[seq] + r].tolist(),
                    )
                    for j in range(seq_len)
                ]
                for r in range(query_len)
            ]
        )
        rows = slice(starts[seq], starts[seq + 1])
        q = batch.query[rows].to(dtype).transpose(0, 1)
        k = key.repeat_interleave(groups, 1).transpose(0, 1)
        v = value.repeat_interleave(groups, 1).transpose(0, 1)
        if softcap == 0:
            heads = torch.nn.functional.scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask, scale=scale
            )[0]
        else:
            scores = softcap * torch.tanh(q @ k.transpose(1, 2) * scale / softcap)
            heads = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        out[rows] = heads.transpose(0, 1)
    return out.to(DEVICE)


def nan_scratch(size, device):
    return torch.full((size,), float("nan"), dtype=torch.float32, device=device)


@contextlib.contextmanager
def configured(impl: str):
    """The kernels of an entry of IMPLS, with NaN for scratch; yields the name the API knows."""
    if impl == "reference":
        yield impl
        return
    from attention_kernels.canvas_attention.triton import launch as kernels

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(kernels, "_scratch", nan_scratch))
        if impl == "triton-tiny":
            config = kernels.TritonConfig(16, 16, 4, 1, parts=2)
            patches.enter_context(mock.patch.object(kernels, "choose_config", return_value=config))
            patches.enter_context(mock.patch.object(kernels, "splits", return_value=3))
            patches.enter_context(mock.patch.object(kernels, "MIN_SPLIT_KEYS", 32))
            patches.enter_context(mock.patch.object(kernels, "SEARCH_WIDTH", 2))
        yield "triton"


def run(batch: CanvasBatch, *, impl, left=-1, right=-1, anchor="canvas", **options) -> Tensor:
    with configured(impl) as name:
        return canvas_attention(
            **batch.tensors(),
            window_left=left,
            window_right=right,
            window_anchor=anchor,
            check_values=True,
            impl=name,
            **options,
        )


WINDOWS = [
    pytest.param(-1, -1, "canvas", id="full-canvas"),
    pytest.param(5, -1, "canvas", id="L5-canvas"),
    pytest.param(0, -1, "canvas", id="L0-canvas"),
    pytest.param(-1, -1, "query", id="full-query"),
    pytest.param(5, 5, "query", id="L5-R5-query"),
    pytest.param(5, -1, "query", id="L5-query"),
    pytest.param(-1, 3, "query", id="R3-query"),
    pytest.param(0, 0, "query", id="L0-R0-query"),
]


@pytest.mark.parametrize(
    ("impl", "dtype"),
    [
        pytest.param("reference", torch.float64, id="reference-fp64"),
        pytest.param("reference", torch.float32, id="reference-fp32"),
        pytest.param("reference", torch.bfloat16, id="reference-bf16"),
        pytest.param("triton", torch.float32, id="triton-fp32"),
        pytest.param("triton", torch.bfloat16, id="triton-bf16"),
        pytest.param("triton", torch.float16, id="triton-fp16"),
        pytest.param("triton-tiny", torch.float32, id="triton-tiny-fp32"),
    ],
)
@pytest.mark.parametrize(("left", "right", "anchor"), WINDOWS)
def test_canvas_attention(impl, left, right, anchor, dtype):
    """Prefill, denoise, encode, fused and empty sequences in one batch agree with fp64."""
    batch = make_batch(
        query_lens=[13, 8, 8, 16, 0, 1, 1],
        seq_lens=[13, 37, 24, 63, 20, 1, 100],
        causal_rows=[13, 0, 8, 8, 0, 1, 0],
        dtype=dtype,
        padded_rows=3,
        strided_query=True,
    )
    window = {"left": left, "right": right, "anchor": anchor}
    out = run(batch, scale=0.2, impl=impl, **window)
    exact = expected(batch, torch.float64, scale=0.2, **window)
    same = expected(batch, dtype, scale=0.2, **window)
    # In fp64 the yardstick itself is rounded like what it measures.
    factor = 8.0 if dtype == torch.float64 else 2.0
    assert_within_error_budget(out[: len(exact)], same, exact, impl, factor)
    assert out[len(exact) :].count_nonzero() == 0


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (16, 8), (16, 2), (6, 2), (20, 1)])
def test_canvas_attention_heads(impl, num_heads, num_kv_heads):
    """A query head reads the key head of its group."""
    batch = make_batch(
        [9, 8], [40, 8], [4, 0], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64
    )
    out = run(batch, scale=0.125, softcap=5.0, impl=impl)
    exact = expected(batch, torch.float64, scale=0.125, softcap=5.0)
    same = expected(batch, torch.float32, scale=0.125, softcap=5.0)
    assert_within_error_budget(out, same, exact, impl)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(16, 16), (32, 32), (64, 128), (80, 16), (128, 64), (512, 16)]
)
def test_canvas_attention_head_dim(impl, head_dim, block_size):
    """Any head size and block size, powers of two or not."""
    batch = make_batch([9, 5], [40, 70], [4, 0], head_dim=head_dim, block_size=block_size)
    out = run(batch, scale=head_dim**-0.5, left=20, impl=impl)
    exact = expected(batch, torch.float64, scale=head_dim**-0.5, left=20)
    same = expected(batch, torch.float32, scale=head_dim**-0.5, left=20)
    # One rounding more than plain PyTorch: scores are in units of log 2.
    assert_within_error_budget(out, same, exact, impl, factor=4.0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("on_device", [False, True])
def test_canvas_attention_fp8_cache(impl, on_device):
    """An FP8 cache is read as its numbers times the scales."""
    batch = make_batch(
        [9, 8], [40, 50], [4, 0], dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn
    )
    scales = {"key_scale": 0.5, "value_scale": 3.0}
    given = scales
    if on_device:
        given = {name: torch.tensor(value, device=DEVICE) for name, value in scales.items()}
    out = run(batch, scale=0.2, impl=impl, **given)
    exact = expected(batch, torch.float64, scale=0.2, **scales)
    same = expected(batch, torch.bfloat16, scale=0.2, **scales)
    assert_within_error_budget(out, same, exact, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_canvas_attention_span(impl):
    """A span reaches outside the window, ahead of the row, and never past the sequence."""
    spans = [(0, 0)] * 3 + [(3, 30)] * 12 + [(0, 0)] * 5 + [(18, 99)] * 4
    batch = make_batch([20, 4], [30, 20], [20, 2], row_spans=spans, padded_rows=2)
    out = run(batch, scale=0.2, left=3, impl=impl)
    exact = expected(batch, torch.float64, scale=0.2, left=3)
    same = expected(batch, torch.float32, scale=0.2, left=3)
    assert_within_error_budget(out[: len(exact)], same, exact, impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_canvas_attention_no_keys(impl):
    """Rows of a sequence without keys are zero, also in a given output."""
    batch = make_batch([4, 3], [0, 9], [2, 0])
    out = torch.full_like(batch.query, 7.0)
    run(batch, scale=0.2, impl=impl, out=out)
    assert out[:4].count_nonzero() == 0
    assert out[4:].count_nonzero() == out[4:].numel()


@pytest.mark.parametrize("impl", IMPLS)
def test_canvas_attention_padded_rows(impl):
    """Padded rows of a given output stay as they are."""
    batch = make_batch([4, 3], [10, 9], [2, 0], padded_rows=5)
    out = torch.full_like(batch.query, 7.0)
    assert run(batch, scale=0.2, impl=impl, out=out) is out
    assert (out[7:] == 7.0).all()
    assert torch.equal(out[:7], run(batch, scale=0.2, impl=impl)[:7])


def test_canvas_attention_no_tokens():
    """A batch without rows or sequences is an empty answer, not an error."""
    assert run(make_batch([0], [5], [0]), impl="auto", scale=1.0).shape[0] == 0
    empty = make_batch([], [], [], padded_rows=3)
    assert run(empty, impl="auto", scale=1.0).count_nonzero() == 0


def test_canvas_attention_chunked_prefill(monkeypatch):
    """A prefill that runs in several chunks of rows is the same attention."""
    from attention_kernels.canvas_attention import reference

    batch = make_batch([50, 20], [70, 40], [50, 7], dtype=torch.float64)
    whole = run(batch, impl="reference", scale=0.2, left=9)
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 70 * 3)
    chunked = run(batch, impl="reference", scale=0.2, left=9)
    torch.testing.assert_close(chunked, whole, rtol=1e-12, atol=1e-12)


@st.composite
def canvas_batches(draw):
    """Any batch the rule knows, with its options."""
    block_size = draw(st.sampled_from([16, 32, 128]))
    num_kv_heads = draw(st.sampled_from([1, 2]))
    query_lens, seq_lens, causal_rows, spans = [], [], [], []
    for _ in range(draw(st.integers(1, 4))):
        query_len = draw(st.one_of(st.sampled_from([0, 1, 16, 17, 32]), st.integers(0, 40)))
        context = draw(st.one_of(st.sampled_from([0, 15, 16, 17, 64]), st.integers(0, 90)))
        seq_len = draw(st.sampled_from([query_len + context] * 7 + [0]))
        causal = draw(st.one_of(st.sampled_from([0, query_len]), st.integers(0, query_len)))
        query_lens.append(query_len)
        seq_lens.append(seq_len)
        causal_rows.append(causal)
        start = draw(st.integers(0, max(seq_len, 1)))
        end = draw(st.integers(start, max(seq_len, start) + 3))
        first = seq_len - query_len
        spans += [(start, end) if start <= first + r < end else (0, 0) for r in range(query_len)]
    anchor = draw(st.sampled_from(["canvas", "query"]))
    widths = st.sampled_from([-1, 0, 1, 7, 31, 200])
    options = {
        "anchor": anchor,
        "left": draw(widths),
        "right": draw(widths) if anchor == "query" else -1,
        "softcap": draw(st.sampled_from([0.0, 3.0])),
        "scale": draw(st.sampled_from([0.1, 1.0])),
    }
    batch = make_batch(
        query_lens,
        seq_lens,
        causal_rows,
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3])),
        num_kv_heads=num_kv_heads,
        head_dim=32,
        block_size=block_size,
        padded_rows=draw(st.sampled_from([0, 5])),
        row_spans=draw(st.sampled_from([None, spans])),
        strided_query=draw(st.booleans()),
        joint_cache=draw(st.booleans()),
        seed=draw(st.integers(0, 9)),
    )
    return batch, options


def given_back(batch: CanvasBatch, left: int, right: int, anchor: str) -> CanvasBatch:
    """The batch after the cache blocks that no row reaches any more were given back."""
    unused = next(i for i, block in enumerate(batch.key_cache) if block.isnan().all())
    table = batch.block_table.clone()
    starts = batch.query_start_loc.tolist()
    for seq, (seq_len, causal) in enumerate(
        zip(batch.seq_lens.tolist(), batch.causal_rows.tolist(), strict=True)
    ):
        rows = slice(starts[seq], starts[seq + 1])
        mask = visibility_mask(
            rows.stop - rows.start,
            seq_len,
            causal,
            window_left=left,
            window_right=right,
            window_anchor=anchor,
            row_spans=None if batch.row_spans is None else batch.row_spans[rows],
            device=DEVICE,
        )
        reached = mask.any(0).nonzero()
        first = int(reached[0]) if len(reached) else seq_len
        table[seq, : first // batch.key_cache.shape[1]] = unused
    return replace(batch, block_table=table)


def check_against_fp64(impl, batch, options):
    window = {name: options[name] for name in ("left", "right", "anchor")}
    out = run(given_back(batch, **window), impl=impl, **options)
    exact = expected(batch, torch.float64, **options)
    same = expected(batch, torch.float32, **options)
    assert_within_error_budget(out[: len(exact)], same, exact, impl, factor=4.0)
    assert out[len(exact) :].count_nonzero() == 0


def alone(batch: CanvasBatch, seq: int) -> CanvasBatch:
    """One sequence of a batch as a batch of its own, on the same cache."""
    rows = slice(*batch.query_start_loc[seq : seq + 2].tolist())
    return replace(
        batch,
        query=batch.query[rows],
        block_table=batch.block_table[seq : seq + 1],
        query_start_loc=batch.query_start_loc[seq : seq + 2] - batch.query_start_loc[seq],
        seq_lens=batch.seq_lens[seq : seq + 1],
        causal_rows=batch.causal_rows[seq : seq + 1],
        row_spans=None if batch.row_spans is None else batch.row_spans[rows],
    )


def check_alone_is_identical(impl, batch, options):
    """By request, or where as many splits are launched; those of "triton-tiny" always are."""
    options = options | {"batch_invariant": impl != "triton-tiny"}
    together = run(batch, impl=impl, **options)
    for seq in range(len(batch.seq_lens)):
        rows = slice(*batch.query_start_loc[seq : seq + 2].tolist())
        assert torch.equal(run(alone(batch, seq), impl=impl, **options), together[rows])


SWEEP = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
# The kernels run some hundred times slower under the interpreter.
SWEPT = [("reference", 60), ("triton", 10), ("triton-tiny", 10)]


def sweep(check, impl, max_examples):
    @settings(SWEEP, max_examples=max_examples)
    @given(canvas_batches())
    def every_case(case):
        check(impl, *case)

    every_case()


@pytest.mark.parametrize(("impl", "max_examples"), SWEPT)
def test_canvas_attention_sweep(impl, max_examples):
    """Any batch agrees with fp64, and padding and unused blocks leave no trace."""
    sweep(check_against_fp64, impl, max_examples)


@pytest.mark.parametrize(
    ("impl", "max_examples"), [*SWEPT[:2], pytest.param(*SWEPT[2], marks=pytest.mark.slow)]
)
def test_canvas_attention_alone(impl, max_examples):
    """A sequence's output is the same bits alone and in any batch."""
    sweep(check_alone_is_identical, impl, max_examples)


@pytest.mark.slow
@pytest.mark.parametrize(("impl", "max_examples"), [("reference", 1500), ("triton-tiny", 200)])
def test_canvas_attention_wide_sweep(impl, max_examples):
    """The sweeps over many more batches."""
    sweep(check_against_fp64, impl, max_examples)
    sweep(check_alone_is_identical, impl, max_examples)


@pytest.mark.parametrize(
    ("left", "right", "anchor", "spans"),
    [
        pytest.param(-1, -1, "canvas", False, id="full"),
        pytest.param(20, -1, "canvas", False, id="L20-canvas"),
        pytest.param(20, 3, "query", False, id="L20-R3-query"),
        pytest.param(5, -1, "canvas", True, id="L5-canvas-spans"),
    ],
)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_canvas_attention_visited_tiles(left, right, anchor, spans, num_splits):
    """The kernel computes the key tiles that some row of a query tile sees, and no other."""
    from attention_kernels.canvas_attention.triton import launch as kernels

    query_lens, seq_lens, causal_rows = [40, 16, 24, 0, 9], [200, 150, 100, 60, 0], [40, 0, 9, 0, 9]
    row_spans = [(0, 0)] * 8 + [(165, 190)] * 22 + [(0, 0)] * 26 + [(60, 85)] * 9 + [(0, 0)] * 24
    batch = make_batch(
        query_lens, seq_lens, causal_rows, row_spans=row_spans if spans else None, padded_rows=4
    )
    config = kernels.TritonConfig(32, 16, 4, 1, parts=num_splits // 2 or 1)
    visited = torch.zeros(len(seq_lens), dtype=torch.int32, device=DEVICE)
    kernels.launch(
        *[tensor for name, tensor in batch.tensors().items() if name != "row_spans"],
        torch.zeros_like(batch.query),
        batch.row_spans,
        None,
        None,
        0.2,
        1.0,
        0.0,
        left,
        right,
        anchor == "canvas",
        max(query_lens),
        max(seq_lens),
        config=config,
        num_splits=num_splits,
        visited=visited,
    )
    tokens_per_tile = 32 // 2  # two query heads share a key head
    starts = batch.query_start_loc.tolist()
    for seq, (query_len, seq_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        mask = visibility_mask(
            query_len,
            seq_len,
            causal_rows[seq],
            window_left=left,
            window_right=right,
            window_anchor=anchor,
            row_spans=batch.row_spans[starts[seq] : starts[seq + 1]] if spans else None,
            device=DEVICE,
        )
        tiles = [keys.any() for rows in mask.split(tokens_per_tile) for keys in rows.split(16, 1)]
        assert visited[seq] == sum(tiles) * 2, f"sequence {seq}"  # key heads


def test_canvas_attention_split_is_used():
    """Few rows and many keys run as several splits."""
    from attention_kernels.canvas_attention.triton import launch as kernels

    batch = make_batch([8], [300], [0])
    with (
        configured("triton-tiny"),
        mock.patch.object(kernels, "_scratch", side_effect=nan_scratch) as scratch,
    ):
        canvas_attention(**batch.tensors(), scale=0.2, impl="triton")
        assert scratch.call_count == 1
        canvas_attention(**batch.tensors(), scale=0.2, impl="triton", batch_invariant=True)
        assert scratch.call_count == 1


@st.composite
def short_replays(draw):
    """Canvases, and how a graph that was captured for longer ones cut their keys."""
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


def test_canvas_attention_short_replay_of_a_long_graph():
    """However many splits were captured for how long a context, a short one is computed rightly,
    in no more key tiles than without splits, and the splits that it leaves empty do nothing."""
    from attention_kernels.canvas_attention.triton import launch as kernels

    config = kernels.TritonConfig(16, 16, 4, 1)

    def launched(batch, num_splits, left):
        out = torch.zeros_like(batch.query)
        visited = torch.zeros_like(batch.seq_lens)
        step = kernels.CanvasLaunch(
            batch.query,
            batch.key_cache,
            *[batch.tensors()[name] for name in BATCH_TENSORS],
            None,
            0.2,
            1.0,
            0.0,
            left,
            -1,
            True,
            16,
            131072,
            config=config,
            num_splits=num_splits,
            visited=visited,
        )
        step(batch.query, batch.key_cache, batch.value_cache, out, None, None)
        return out, visited

    @settings(SWEEP, max_examples=10)
    @given(short_replays())
    def every_case(case):
        batch, num_splits, left = case
        with (
            mock.patch.object(kernels, "_scratch", nan_scratch),
            mock.patch.object(kernels, "MIN_SPLIT_KEYS", 32),
        ):
            out, visited = launched(batch, num_splits, left)
            whole, visited_whole = launched(batch, 1, left)
        assert torch.equal(visited, visited_whole)
        exact = expected(batch, torch.float64, scale=0.2, left=left)
        same = expected(batch, torch.float32, scale=0.2, left=left)
        assert_within_error_budget(out[: len(exact)], same, exact, "split", factor=4.0)
        if int(batch.seq_lens.max()) <= 32:
            # Too short to be cut: written as it is without splits.
            assert torch.equal(out, whole)

    every_case()


# Multiprocessors; programs that one runs at once; programs of a canvas; keys; bytes of a partial:
# of full and sliding layers of the 26B shape on an H100 and an A100.
GPUS = {
    "full, H100": (132, 1, 64, None, 128 * 258 * 4),
    "sliding, H100": (132, 1, 32, 1279, 128 * 258 * 4),
    "full, A100": (108, 1, 64, None, 64 * 514 * 4),
    "sliding, A100": (108, 2, 64, 1279, 64 * 258 * 4),
}


@pytest.mark.parametrize(
    ("gpu", "counts"),
    [
        ("full, H100", {1: 2, 2: 1, 3: 2, 4: 1, 5: 1, 8: 1, 32: 1}),
        ("sliding, H100", {1: 4, 2: 2, 3: 1, 4: 1, 5: 1, 8: 1, 32: 1}),
        ("full, A100", {1: 5, 2: 5, 3: 1, 4: 1, 5: 1, 8: 1, 32: 1}),
        ("sliding, A100", {1: 3, 2: 1, 3: 1, 4: 1, 5: 1, 8: 1, 32: 1}),
    ],
)
def test_splits(gpu, counts):
    """One or two canvases fill a GPU with splits of their keys, and from four on there are none."""
    from attention_kernels.canvas_attention.splits import LONG_KEYS, SCRATCH_BYTES, splits

    multiprocessors, at_once, programs, keys, partial_bytes = GPUS[gpu]
    at_once *= multiprocessors
    for canvases, expected_splits in counts.items():
        whole = canvases * programs
        found = splits(whole, at_once, keys or LONG_KEYS, partial_bytes)
        assert found == expected_splits, f"{canvases} canvases"
        assert found == 1 or whole * found * partial_bytes <= SCRATCH_BYTES
        # No fewer programs than without, and with splits most of a GPU has one.
        assert found == 1 or whole * found >= 0.85 * at_once


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
    """Query tiles, heads and splits by requests and context, of the 26B shape on an H100."""
    from attention_kernels.canvas_attention.triton import configs
    from attention_kernels.canvas_attention.triton import launch as kernels

    head_dim, num_kv_heads = (512, 2) if window < 0 else (256, 8)

    def empty(*shape, dtype=torch.int32):
        return torch.empty(shape, dtype=dtype, device="meta")

    config = configs.tuned_config(head_dim, torch.bfloat16, torch.bfloat16, (9, 0))
    with mock.patch.object(kernels, "multiprocessors", return_value=132):
        launch = kernels.CanvasLaunch(
            empty(canvases * 256, 16, head_dim, dtype=torch.bfloat16),
            empty(4, 16, num_kv_heads, head_dim, dtype=torch.bfloat16),
            empty(canvases, 8192),
            empty(canvases + 1),
            empty(canvases),
            empty(canvases),
            None,
            0.1,
            1.0,
            0.0,
            window,
            -1,
            True,
            256,
            context + 256,
            config=config,
        )
    assert launch.grid == grid


def test_plan_canvas_attention():
    """A plan runs layers of its kind as the function does, padding and all; and it checks."""
    batch = make_batch([13, 8], [40, 90], [13, 0], padded_rows=3)
    caches = {"key_cache": batch.key_cache * 2, "value_cache": -batch.value_cache}
    other = replace(batch, query=-batch.query, **caches)
    live = batch.query[: batch.num_live_tokens]
    tensors = batch.tensors() | {"query": live}
    for impl in ("reference", "triton"):
        plan = plan_canvas_attention(**tensors, scale=0.2, window_left=9, impl=impl)
        for layer in (batch, other):
            out = torch.full_like(layer.query, 7.0)
            plan(layer.query, layer.key_cache, layer.value_cache, out, None, None)
            wanted = canvas_attention(**layer.tensors(), scale=0.2, window_left=9, impl=impl)
            assert torch.equal(out[: len(live)], wanted[: len(live)])
            assert (out[len(live) :] == 7.0).all()
    with pytest.raises(ValueError, match="seq_lens has dtype"):
        plan_canvas_attention(**(tensors | {"seq_lens": batch.seq_lens.long()}), scale=0.2)
    with pytest.raises(ValueError, match="window_left=-2"):
        plan_canvas_attention(**tensors, scale=0.2, window_left=-2)


def test_canvas_attention_op():
    """The custom op passes torch's own checks."""
    import attention_kernels.canvas_attention.triton.launch  # noqa: F401 (registers the op)

    batch = make_batch([4, 3], [10, 9], [2, 0])
    tensors = [tensor for name, tensor in batch.tensors().items() if name != "row_spans"]
    out = torch.zeros_like(batch.query)
    arguments = (*tensors, out, None, None, None, 0.2, 1.0, 0.0, 5, -1, True, 7, 32, False)
    torch.library.opcheck(torch.ops.attention_kernels.canvas_attention_triton.default, arguments)


@pytest.mark.parametrize("impl", ["triton"])
def test_canvas_attention_compiled(impl):
    """The public function traces into one graph and computes the same bits."""
    batch = make_batch([4, 3], [10, 9], [2, 0])

    def attend(query: Tensor) -> Tensor:
        arguments = {**batch.tensors(), "query": query}
        return canvas_attention(**arguments, scale=0.2, window_left=5, impl=impl) * 2

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(batch.query), attend(batch.query))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_canvas_attention_graph_replay():
    """A captured graph computes with the lengths and causal rows of its replay."""
    batch = make_batch([64, 64], [300, 5000], [0, 64], dtype=torch.bfloat16)
    out = torch.zeros_like(batch.query)
    arguments = {**batch.tensors(), "scale": 0.2, "impl": "triton"}
    bounds = {"max_query_len": 64, "max_seq_len": 5000}
    canvas_attention(**arguments, **bounds, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        canvas_attention(**arguments, **bounds, out=out)
    for causal_rows, seq_lens in [([64, 0], [300, 5000]), ([20, 1], [290, 64])]:
        batch.causal_rows.copy_(torch.tensor(causal_rows))
        batch.seq_lens.copy_(torch.tensor(seq_lens))
        graph.replay()
        assert torch.equal(out, canvas_attention(**arguments, **bounds))
