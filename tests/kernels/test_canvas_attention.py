"""Tests of canvas_attention against an independent fp64 computation."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.canvas_attention import PagedCache, Window, plan_canvas_attention
from attention_kernels.testing import CanvasBatch, assert_within_error_budget
from tests.support.oracles.canvas_attention import (
    DEVICE,
    IMPLS,
    SWEEP,
    arguments_of,
    attend,
    expected,
    make_batch,
    run,
)
from tests.support.oracles.kernel_checks import visibility_mask

WINDOWS = {
    "full-canvas": (-1, -1, "canvas"),
    "L5-canvas": (5, -1, "canvas"),
    "L0-canvas": (0, -1, "canvas"),
    "full-query": (-1, -1, "query"),
    "L5-R5-query": (5, 5, "query"),
    "L5-query": (5, -1, "query"),
    "R3-query": (-1, 3, "query"),
    "L0-R0-query": (0, 0, "query"),
}
# Under the interpreter a case takes up to seconds: of every type, and in many small pieces, this
# window.
OFTEN = "L5-canvas"
COMPUTED = {
    "reference-fp64": ("reference", torch.float64),
    "reference-fp32": ("reference", torch.float32),
    "reference-bf16": ("reference", torch.bfloat16),
    "triton-fp32": ("triton", torch.float32),
    "triton-bf16": ("triton", torch.bfloat16),
    "triton-fp16": ("triton", torch.float16),
    "triton-tiny-fp32": ("triton-tiny", torch.float32),
}


def assert_near_fp64(out, batch: CanvasBatch, impl: str, factor: float = 2.0, **options) -> None:
    """Check the live rows of a batch's output against fp64, and that its padded rows are 0."""
    exact = expected(batch, torch.float64, **options)
    same = expected(batch, batch.query.dtype, **options)
    assert_within_error_budget(out[: len(exact)], same, exact, impl, factor)
    assert out[len(exact) :].count_nonzero() == 0


@pytest.mark.parametrize(
    ("left", "right", "anchor", "impl", "dtype"),
    [
        pytest.param(
            *window,
            *computed,
            id=f"{name}-{how}",
            marks=pytest.mark.slow
            if how.startswith("triton") and how != "triton-fp32" and name != OFTEN
            else (),
        )
        for name, window in WINDOWS.items()
        for how, computed in COMPUTED.items()
    ],
)
def test_canvas_attention(impl, left, right, anchor, dtype):
    """Prefill, denoise, encode, fused and empty sequences in one batch agree with fp64."""
    batch = make_batch(
        query_lens=[13, 8, 8, 16, 0, 1, 1],
        seq_lens=[13, 37, 24, 63, 20, 1, 100],
        causal_rows=[13, 0, 8, 8, 0, 1, 0],
        # Every head takes as long again in small pieces.
        num_heads=2 if impl == "triton-tiny" else 4,
        num_kv_heads=1 if impl == "triton-tiny" else 2,
        dtype=dtype,
        padded_rows=3,
        strided_query=True,
    )
    # In fp64 the yardstick itself is rounded like what it measures.
    factor = 8.0 if dtype == torch.float64 else 2.0
    options = {"scale": 0.2, "left": left, "right": right, "anchor": anchor}
    assert_near_fp64(run(batch, impl=impl, **options), batch, impl, factor, **options)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "impl"),
    [
        pytest.param(*heads, impl, marks=pytest.mark.slow if impl == "triton-tiny" else ())
        for heads in [(1, 1), (16, 8), (16, 2), (6, 2), (20, 1)]
        for impl in IMPLS
    ],
)
def test_canvas_attention_heads(impl, num_heads, num_kv_heads):
    """A query head reads the key head of its group."""
    batch = make_batch(
        [9, 8], [40, 8], [4, 0], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64
    )
    options = {"scale": 0.125, "softcap": 5.0}
    assert_near_fp64(run(batch, impl=impl, **options), batch, impl, **options)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(16, 16), (32, 32), (64, 128), (80, 16), (128, 64), (512, 16)]
)
def test_canvas_attention_head_dim(impl, head_dim, block_size):
    """Any head size and block size, a power of two or not, agrees with fp64."""
    batch = make_batch([9, 5], [40, 70], [4, 0], head_dim=head_dim, block_size=block_size)
    # One rounding more than plain PyTorch: scores are in units of log 2.
    options = {"scale": head_dim**-0.5, "left": 20}
    assert_near_fp64(run(batch, impl=impl, **options), batch, impl, 4.0, **options)


@pytest.mark.parametrize(
    ("impl", "on_device"),
    [
        pytest.param(impl, on_device, marks=pytest.mark.slow if impl == "triton-tiny" else ())
        for on_device in (True, False)
        for impl in IMPLS
    ],
)
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
    assert_near_fp64(out, batch, impl, scale=0.2, **scales)


@pytest.mark.parametrize("impl", IMPLS)
def test_canvas_attention_span(impl):
    """A span reaches outside the window, ahead of the row, and never past the sequence."""
    spans = [(0, 0)] * 3 + [(3, 30)] * 12 + [(0, 0)] * 5 + [(18, 99)] * 4
    batch = make_batch([20, 4], [30, 20], [20, 2], row_spans=spans, padded_rows=2)
    assert_near_fp64(run(batch, scale=0.2, left=3, impl=impl), batch, impl, scale=0.2, left=3)


@pytest.mark.parametrize("impl", IMPLS)
def test_canvas_attention_given_output(impl):
    """In a given output, rows of a sequence without keys become zero, and padded rows stay."""
    batch = make_batch([4, 3], [0, 9], [2, 0], padded_rows=5)
    out = torch.full_like(batch.query, 7.0)
    assert run(batch, scale=0.2, impl=impl, out=out) is out
    assert out[:4].count_nonzero() == 0
    assert out[4:7].count_nonzero() == out[4:7].numel()
    assert (out[7:] == 7.0).all()
    assert torch.equal(out[:7], run(batch, scale=0.2, impl=impl)[:7])


def test_canvas_attention_no_tokens():
    """A batch without rows or sequences gives an empty result and no error."""
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
    """Draw any batch that the mask supports, with its options."""
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


def given_back(batch: CanvasBatch, window: Window) -> CanvasBatch:
    """Return the batch without the cache blocks that no row reaches any more."""
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
            window,
            row_spans=None if batch.row_spans is None else batch.row_spans[rows],
            device=DEVICE,
        )
        reached = mask.any(0).nonzero()
        first = int(reached[0]) if len(reached) else seq_len
        table[seq, : first // batch.key_cache.shape[1]] = unused
    return replace(batch, block_table=table)


def check_against_fp64(impl, batch, options):
    window = Window(*(options[name] for name in ("left", "right", "anchor")))
    out = run(given_back(batch, window), impl=impl, **options)
    assert_near_fp64(out, batch, impl, 4.0, **options)


def alone(batch: CanvasBatch, seq: int) -> CanvasBatch:
    """Return one sequence of a batch as a batch of its own, on the same cache."""
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
    """Compare bits by request where as many splits are launched, as "triton-tiny" always does."""
    options = options | {"most_splits": 8 if impl == "triton-tiny" else 1}
    together = run(batch, impl=impl, **options)
    for seq in range(len(batch.seq_lens)):
        rows = slice(*batch.query_start_loc[seq : seq + 2].tolist())
        assert torch.equal(run(alone(batch, seq), impl=impl, **options), together[rows])


# The kernels run some hundred times slower under the interpreter.
SWEPT_OFTEN = [
    ("reference", 60),
    ("triton", 5),
    pytest.param("triton-tiny", 4, marks=pytest.mark.slow),
]


def sweep(check, impl, max_examples):
    @settings(SWEEP, max_examples=max_examples)
    @given(canvas_batches())
    def every_case(case):
        check(impl, *case)

    every_case()


@pytest.mark.parametrize(("impl", "max_examples"), SWEPT_OFTEN)
def test_canvas_attention_sweep(impl, max_examples):
    """Any batch agrees with fp64, and padding and unused blocks leave no trace."""
    sweep(check_against_fp64, impl, max_examples)


@pytest.mark.parametrize(("impl", "max_examples"), SWEPT_OFTEN)
def test_canvas_attention_alone(impl, max_examples):
    """A sequence's output is the same bits alone and in any batch."""
    sweep(check_alone_is_identical, impl, max_examples)


def test_plan_canvas_attention():
    """A plan runs layers of its kind as the function does, padding included, and checks them."""
    batch = make_batch([13, 8], [40, 90], [13, 0], padded_rows=3)
    caches = {"key_cache": batch.key_cache * 2, "value_cache": -batch.value_cache}
    other = replace(batch, query=-batch.query, **caches)
    live = batch.query[: batch.num_live_tokens]
    tensors = batch.tensors() | {"query": live}
    for impl in ("reference", "triton"):
        plan = plan_canvas_attention(*arguments_of(**tensors, scale=0.2, left=9), impl=impl)
        for layer in (batch, other):
            out = torch.full_like(layer.query, 7.0)
            plan(layer.query, PagedCache(layer.key_cache, layer.value_cache), out)
            wanted = attend(**layer.tensors(), scale=0.2, left=9, impl=impl)
            assert torch.equal(out[: len(live)], wanted[: len(live)])
            assert (out[len(live) :] == 7.0).all()
    with pytest.raises(ValueError, match="seq_lens has dtype"):
        plan_canvas_attention(*arguments_of(**(tensors | {"seq_lens": batch.seq_lens.long()})))


# The figures of "DiffusionGemma in vLLM" with a window of 2: a row per query, a column per key.
# Written by hand.
PREFILL = """
    x.....
    xx....
    xxx...
    .xxx..
    ..xxx.
    ...xxx
"""
DENOISE = """
    ....xxxxx.
    .....xxxxx
    ......xxxx
    .......xxx
"""
DENOISE_CANVAS_ANCHOR = """
    ....xxxxxx
    ....xxxxxx
    ....xxxxxx
    ....xxxxxx
"""
ENCODE = """
    ....xxx...
    .....xxx..
    ......xxx.
    .......xxx
"""


def drawn(figure: str) -> torch.Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in figure.split()])


@pytest.mark.parametrize("anchor", ["query", "canvas"])
@pytest.mark.parametrize(
    ("lengths", "figures"),
    [
        ((6, 6, 6), {"query": PREFILL, "canvas": PREFILL}),
        ((4, 10, 0), {"query": DENOISE, "canvas": DENOISE_CANVAS_ANCHOR}),
        ((4, 10, 4), {"query": ENCODE, "canvas": ENCODE}),
    ],
    ids=["prefill", "denoise", "encode"],
)
def test_visibility_mask_figures(lengths, figures, anchor):
    """The masks are those of the post, key by key; without a window they lose their left edge."""
    query_len, seq_len, causal_rows = lengths
    mask = visibility_mask(*lengths, Window(2, 2 if anchor == "query" else -1, anchor))
    assert torch.equal(mask, drawn(figures[anchor]))
    open_mask = visibility_mask(*lengths, Window(-1, -1, anchor))
    last = seq_len - query_len + torch.arange(query_len) if causal_rows else seq_len - 1
    assert torch.equal(open_mask.sum(1), torch.as_tensor(last + 1).expand(query_len))
    assert torch.equal(open_mask, open_mask.cummin(1).values)
