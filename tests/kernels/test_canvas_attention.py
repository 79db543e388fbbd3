"""canvas_attention against the figures of the vLLM post and an independent fp64 computation."""

import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention_kernels import canvas_attention
from attention_kernels.canvas_attention import api
from attention_kernels.canvas_attention.reference import visibility_mask
from attention_kernels.testing import (
    CanvasBatch,
    assert_within_error_budget,
    make_canvas_batch,
)

# The figures of "DiffusionGemma in vLLM": a row per query, a column per key. Written by hand.
PREFILL_FULL = """
    x.....
    xx....
    xxx...
    xxxx..
    xxxxx.
    xxxxxx
"""
PREFILL_W2 = """
    x.....
    xx....
    xxx...
    .xxx..
    ..xxx.
    ...xxx
"""
DENOISE_FULL = """
    xxxxxxxxxx
    xxxxxxxxxx
    xxxxxxxxxx
    xxxxxxxxxx
"""
DENOISE_W2 = """
    ....xxxxx.
    .....xxxxx
    ......xxxx
    .......xxx
"""
DENOISE_W2_CANVAS_ANCHOR = """
    ....xxxxxx
    ....xxxxxx
    ....xxxxxx
    ....xxxxxx
"""
ENCODE_FULL = """
    xxxxxxx...
    xxxxxxxx..
    xxxxxxxxx.
    xxxxxxxxxx
"""
ENCODE_W2 = """
    ....xxx...
    .....xxx..
    ......xxx.
    .......xxx
"""
# Keys 1 to 4 are an image: its rows see all of it, also outside the window and ahead.
SPAN_W1 = """
    x.....
    xxxxx.
    .xxxx.
    .xxxx.
    .xxxx.
    ....xx
"""


def drawn(figure: str) -> Tensor:
    return torch.tensor([[mark == "x" for mark in row] for row in figure.split()])


@pytest.mark.parametrize(
    ("figure", "query_len", "seq_len", "causal_rows", "window", "anchor"),
    [
        pytest.param(PREFILL_FULL, 6, 6, 6, -1, "query", id="prefill-full"),
        pytest.param(PREFILL_W2, 6, 6, 6, 2, "query", id="prefill-W2"),
        pytest.param(DENOISE_FULL, 4, 10, 0, -1, "query", id="denoise-full"),
        pytest.param(DENOISE_W2, 4, 10, 0, 2, "query", id="denoise-W2"),
        pytest.param(ENCODE_FULL, 4, 10, 4, -1, "query", id="encode-full"),
        pytest.param(ENCODE_W2, 4, 10, 4, 2, "query", id="encode-W2"),
        pytest.param(PREFILL_W2, 6, 6, 6, 2, "canvas", id="prefill-W2-canvas-anchor"),
        pytest.param(DENOISE_FULL, 4, 10, 0, -1, "canvas", id="denoise-full-canvas-anchor"),
        pytest.param(
            DENOISE_W2_CANVAS_ANCHOR, 4, 10, 0, 2, "canvas", id="denoise-W2-canvas-anchor"
        ),
        pytest.param(ENCODE_W2, 4, 10, 4, 2, "canvas", id="encode-W2-canvas-anchor"),
    ],
)
def test_visibility_mask_figures(figure, query_len, seq_len, causal_rows, window, anchor):
    """The masks are those of the post, key by key."""
    mask = visibility_mask(
        query_len,
        seq_len,
        causal_rows,
        window_left=window,
        window_right=window if anchor == "query" else -1,
        window_anchor=anchor,
    )
    assert torch.equal(mask, drawn(figure))


def test_visibility_mask_fused_encode_and_denoise():
    """Known rows stay causal and the canvas behind them sees one prefix and itself."""
    mask = visibility_mask(6, 9, 3, window_left=1, window_anchor="canvas")
    expected = drawn(
        """
        ..xx.....
        ...xx....
        ....xx...
        .....xxxx
        .....xxxx
        .....xxxx
        """
    )
    assert torch.equal(mask, expected)


def test_visibility_mask_span():
    """Rows of an image see all of it; the other rows see their window."""
    spans = torch.tensor([[0, 0], [1, 5], [1, 5], [1, 5], [1, 5], [0, 0]], dtype=torch.int32)
    mask = visibility_mask(6, 6, 6, window_left=1, row_spans=spans)
    assert torch.equal(mask, drawn(SPAN_W1))


def test_visibility_mask_interior_canvas_row():
    """With the symmetric window an interior canvas row sees 2W + 1 keys."""
    mask = visibility_mask(9, 20, 0, window_left=3, window_right=3, window_anchor="query")
    assert mask[4].sum() == 2 * 3 + 1


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
    return out


def run(batch: CanvasBatch, *, left=-1, right=-1, anchor="canvas", **options) -> Tensor:
    return canvas_attention(
        **batch.tensors(),
        window_left=left,
        window_right=right,
        window_anchor=anchor,
        check_values=True,
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


@pytest.mark.parametrize("impl", ["reference"])
@pytest.mark.parametrize(("left", "right", "anchor"), WINDOWS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_canvas_attention(impl, left, right, anchor, dtype):
    """Prefill, denoise, encode, fused and empty sequences in one batch agree with fp64."""
    batch = make_canvas_batch(
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
    assert_within_error_budget(out[: len(exact)], same, exact, impl)
    assert out[len(exact) :].count_nonzero() == 0


@pytest.mark.parametrize("impl", ["reference"])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (8, 1), (16, 8), (16, 2), (6, 3)])
def test_canvas_attention_heads(impl, num_heads, num_kv_heads):
    """A query head reads the key head of its group."""
    batch = make_canvas_batch(
        [9, 8], [40, 8], [4, 0], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=64
    )
    out = run(batch, scale=0.125, softcap=5.0, impl=impl)
    exact = expected(batch, torch.float64, scale=0.125, softcap=5.0)
    same = expected(batch, torch.float32, scale=0.125, softcap=5.0)
    assert_within_error_budget(out, same, exact, impl)


@pytest.mark.parametrize("impl", ["reference"])
@pytest.mark.parametrize("on_device", [False, True])
def test_canvas_attention_fp8_cache(impl, on_device):
    """An FP8 cache is read as its numbers times the scales."""
    batch = make_canvas_batch(
        [9, 8], [40, 50], [4, 0], dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn
    )
    scales = {"key_scale": 0.5, "value_scale": 3.0}
    given = {k: torch.tensor(v) for k, v in scales.items()} if on_device else scales
    out = run(batch, scale=0.2, impl=impl, **given)
    exact = expected(batch, torch.float64, scale=0.2, **scales)
    same = expected(batch, torch.bfloat16, scale=0.2, **scales)
    assert_within_error_budget(out, same, exact, impl)


@pytest.mark.parametrize("impl", ["reference"])
def test_canvas_attention_span(impl):
    """A span reaches outside the window, ahead of the row, and never past the sequence."""
    spans = [(0, 0)] * 3 + [(3, 30)] * 12 + [(0, 0)] * 5 + [(18, 99)] * 4
    batch = make_canvas_batch([20, 4], [30, 20], [20, 2], row_spans=spans, padded_rows=2)
    out = run(batch, scale=0.2, left=3, impl=impl)
    exact = expected(batch, torch.float64, scale=0.2, left=3)
    same = expected(batch, torch.float32, scale=0.2, left=3)
    assert_within_error_budget(out[: len(exact)], same, exact, impl)


@pytest.mark.parametrize("impl", ["reference"])
def test_canvas_attention_no_keys(impl):
    """Rows of a sequence without keys are zero, also in a given output."""
    batch = make_canvas_batch([4, 3], [0, 9], [2, 0])
    out = torch.full_like(batch.query, 7.0)
    run(batch, scale=0.2, impl=impl, out=out)
    assert out[:4].count_nonzero() == 0
    assert out[4:].count_nonzero() == out[4:].numel()


@pytest.mark.parametrize("impl", ["reference"])
def test_canvas_attention_padded_rows(impl):
    """Padded rows of a given output stay as they are."""
    batch = make_canvas_batch([4, 3], [10, 9], [2, 0], padded_rows=5)
    out = torch.full_like(batch.query, 7.0)
    assert run(batch, scale=0.2, impl=impl, out=out) is out
    assert (out[7:] == 7.0).all()
    assert torch.equal(out[:7], run(batch, scale=0.2, impl=impl)[:7])


def test_canvas_attention_no_tokens():
    """A batch without rows or sequences is an empty answer, not an error."""
    assert run(make_canvas_batch([0], [5], [0]), scale=1.0).shape[0] == 0
    assert run(make_canvas_batch([], [], [], padded_rows=3), scale=1.0).count_nonzero() == 0


def test_canvas_attention_chunked_prefill(monkeypatch):
    """A prefill that runs in several chunks of rows is the same attention."""
    from attention_kernels.canvas_attention import reference

    batch = make_canvas_batch([50, 20], [70, 40], [50, 7], dtype=torch.float64)
    whole = run(batch, scale=0.2, left=9)
    monkeypatch.setattr(reference, "MAX_SCORES", 4 * 70 * 3)
    torch.testing.assert_close(run(batch, scale=0.2, left=9), whole, rtol=1e-12, atol=1e-12)


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
    batch = make_canvas_batch(
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


def check_against_fp64(impl, batch, options):
    out = run(batch, impl=impl, **options)
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
    together = run(batch, impl=impl, **options)
    for seq in range(len(batch.seq_lens)):
        rows = slice(*batch.query_start_loc[seq : seq + 2].tolist())
        assert torch.equal(run(alone(batch, seq), impl=impl, **options), together[rows])


SWEEP = settings(deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@settings(SWEEP, max_examples=60)
@given(canvas_batches())
def test_canvas_attention_sweep_reference(case):
    """Any batch agrees with fp64, and padding and unused blocks leave no trace."""
    check_against_fp64("reference", *case)


@settings(SWEEP, max_examples=60)
@given(canvas_batches())
def test_canvas_attention_alone_reference(case):
    """A sequence's output is the same bits alone and in any batch."""
    check_alone_is_identical("reference", *case)


@pytest.mark.slow
@settings(SWEEP, max_examples=1500)
@given(canvas_batches())
def test_canvas_attention_wide_sweep_reference(case):
    """The sweep over many more batches."""
    check_against_fp64("reference", *case)
    check_alone_is_identical("reference", *case)


def changed(batch: CanvasBatch, **tensors) -> dict:
    return {**batch.tensors(), "scale": 1.0, **tensors}


BATCH = make_canvas_batch([4, 3], [10, 9], [2, 0])
FP8_BATCH = make_canvas_batch([4], [10], [2], cache_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (changed(BATCH, query=BATCH.query[0]), "query has shape"),
        (changed(BATCH, query=BATCH.query.int()), "query has dtype"),
        (changed(BATCH, query=BATCH.query.half()), "key_cache has dtype"),
        (changed(BATCH, query=BATCH.query[..., :16]), "key_cache has head_dim 32"),
        (changed(BATCH, query=BATCH.query[:, :3]), "query has 3 heads"),
        (changed(BATCH, query=BATCH.query.mT.contiguous().mT), "query has stride"),
        (changed(BATCH, key_cache=BATCH.key_cache[0]), "key_cache has shape"),
        (changed(BATCH, value_cache=BATCH.value_cache[:1]), "value_cache is"),
        (changed(BATCH, seq_lens=BATCH.seq_lens.long()), "seq_lens has dtype"),
        (changed(BATCH, seq_lens=BATCH.seq_lens[None]), "seq_lens has shape"),
        (changed(BATCH, causal_rows=BATCH.causal_rows.bool()), "causal_rows has dtype torch.bool"),
        (changed(BATCH, causal_rows=BATCH.causal_rows[:1]), "causal_rows has shape"),
        (changed(BATCH, causal_rows=BATCH.causal_rows.to("meta")), "causal_rows is on meta"),
        (changed(BATCH, query_start_loc=BATCH.seq_lens), "query_start_loc has shape"),
        (changed(BATCH, block_table=BATCH.block_table[0]), "block_table has shape"),
        (changed(BATCH, block_table=BATCH.block_table[:1]), "block_table has shape"),
        (changed(BATCH, row_spans=BATCH.seq_lens), "row_spans has shape"),
        (changed(BATCH, out=BATCH.query.double()), "out is torch.float64"),
        (changed(BATCH, softcap=-1.0), "softcap=-1.0"),
        (changed(BATCH, softcap=float("nan")), "softcap=nan"),
        (changed(BATCH, window_left=-2), "window_left=-2"),
        (changed(BATCH, window_right=4), "window_right=4 has no meaning"),
        (changed(BATCH, window_anchor="row"), "window_anchor='row'"),
        (changed(BATCH, impl="fast"), "impl='fast'"),
        (changed(BATCH, max_query_len=-1), "max_query_len=-1"),
        (changed(BATCH, key_scale=1.0), "key_scale is given"),
        (changed(FP8_BATCH), "key_scale is missing"),
        (changed(FP8_BATCH, key_scale=1.0), "value_scale is missing"),
        (changed(FP8_BATCH, key_scale=torch.ones(2)), "key_scale is torch.float32"),
        (
            changed(BATCH, causal_rows=torch.tensor([5, 0], dtype=torch.int32), check_values=True),
            r"causal_rows\[0\]=5 must be between 0 and the 4 query rows",
        ),
        (
            changed(BATCH, seq_lens=torch.tensor([10, 2], dtype=torch.int32), check_values=True),
            r"seq_lens\[1\]=2",
        ),
        (
            changed(BATCH, block_table=BATCH.block_table + 99, check_values=True),
            r"block_table\[0\]",
        ),
        (
            changed(
                BATCH, query_start_loc=torch.tensor([0, 5, 3], dtype=torch.int32), check_values=True
            ),
            "query_start_loc=",
        ),
        (
            changed(
                BATCH, row_spans=torch.tensor([[2, 1]] * 7, dtype=torch.int32), check_values=True
            ),
            r"row_spans\[0\]=\[2, 1\]",
        ),
    ],
)
def test_canvas_attention_bad_input(arguments, message):
    """A wrong argument is named, with its value and what is allowed."""
    with pytest.raises(ValueError, match=message):
        canvas_attention(**arguments)


def test_canvas_attention_cute_refused():
    """An explicit choice runs or raises."""
    with pytest.raises(NotImplementedError, match='impl="cute"'):
        canvas_attention(**changed(BATCH), impl="cute")


def test_canvas_attention_auto_logs_once(caplog):
    """The automatic choice is said once, with its reason."""
    api._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger=api.logger.name):
        canvas_attention(**changed(BATCH))
        canvas_attention(**changed(BATCH))
    assert [record.message for record in caplog.records] == [
        "canvas attention runs reference: the tensors are on cpu."
    ]


def test_import_needs_torch_alone():
    """Importing the package loads neither Triton nor the engine."""
    code = (
        "import sys, attention_kernels, attention_kernels.testing\n"
        "found = {'triton', 'vllm', 'vllm_diffusion', 'cutlass'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
