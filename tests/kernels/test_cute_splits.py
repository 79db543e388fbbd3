"""Tests of the splits of ``impl="cute"``: their keys, their combination and their number.

FlashAttention-4 cannot run here. It is replaced by a function of the same signature, in PyTorch,
that writes what the kernel with splits would and leaves everything else NaN; the kernel that
combines them is the one that serves.
"""

from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from attention_kernels.canvas_attention import (
    AttentionOptions,
    PagedCache,
    Sequences,
    Window,
    warm_up_canvas_attention,
)
from attention_kernels.canvas_attention.cute import launch
from attention_kernels.canvas_attention.cute.visibility import Visibility
from attention_kernels.canvas_attention.splits import MIN_SPLIT_KEYS
from attention_kernels.testing import make_canvas_batch
from tests.kernels.test_cute_visibility import CUTS, sequences
from tests.support.counters.triton_compile import empty
from tests.support.oracles.canvas_attention import attend
from tests.support.oracles.kernel_checks import visibility_mask

pytest.importorskip("triton")


@settings(max_examples=200, deadline=None)
@given(sequences(longest=400), st.sampled_from(CUTS), st.integers(2, 8))
def test_visited_in_split(sequence, cut, num_splits):
    """The splits of a query tile have its key tiles in order, and surplus splits have none."""
    tile_m, _, group = cut
    visible = sequence.visibility()
    live = visible.live_splits(num_splits)
    assert 1 <= live <= num_splits
    assert live == 1 or sequence.seq_len > (live - 1) * MIN_SPLIT_KEYS
    for tile in range(-(-sequence.query_len * group // tile_m)):
        first, end = visible.visited(tile, *cut)
        found = []
        for split in range(num_splits):
            start, stop = visible.visited_in_split(tile, *cut, split, num_splits)
            assert start >= stop or split < live
            found += range(start, stop)
        assert found == list(range(first, end))


def flash_attention_4(
    kernel,
    query,
    key_cache,
    value_cache,
    out,
    lse,
    scale,
    query_start_loc,
    sequences,
    block_table,
    window_left,
    window_right,
):
    """Write what the compiled ``kernel`` writes."""
    assert kernel.split == (lse is not None)
    if lse is None:
        out, lse = out[None], torch.empty(1, query.shape[1], query.shape[0])
    num_splits = out.shape[0]
    tile_m, tile_n = kernel.tile
    windows = [-1 if size is None else size for size in (window_left, window_right)]
    anchor = "canvas" if kernel.canvas_anchor else "query"
    starts = query_start_loc.tolist()
    for seq, (seq_len, causal) in enumerate(sequences.T.tolist()):
        rows = range(starts[seq], starts[seq + 1])
        visible = Visibility(
            *(len(rows), seq_len, causal, window_left, window_right, kernel.canvas_anchor)
        )
        seen = visibility_mask(len(rows), seq_len, causal, Window(*windows, anchor))
        blocks = block_table[seq, : -(-seq_len // key_cache.shape[1])]
        keys, values = (
            cache[blocks].flatten(0, 1)[:seq_len].double() for cache in (key_cache, value_cache)
        )
        for pair in range(len(rows) * kernel.group):
            row, in_group = divmod(pair, kernel.group)
            for kv_head in range(key_cache.shape[2]):
                head = kv_head * kernel.group + in_group
                scores = keys[:, kv_head] @ query[rows[row], head].double() * scale
                scores = scores.masked_fill(~seen[row], float("-inf"))
                for split in range(visible.live_splits(num_splits)):
                    first, end = visible.visited_in_split(
                        *(pair // tile_m, tile_m, tile_n, kernel.group), split, num_splits
                    )
                    some = slice(first * tile_n, max(first, end) * tile_n)
                    found = scores[some].logsumexp(0)
                    lse[split, head, rows[row]] = found
                    # A split without a key tile writes no row on Blackwell, zeros on Hopper.
                    if first < end:
                        weights = (scores[some] - found.clamp(min=-1e30)).exp()
                        out[split, rows[row], head] = weights @ values[some, kv_head]


def attend_in_splits(batch, num_splits, capability, out=None, **windows):
    """Run ``impl="cute"`` on this batch, with NaN in all that its kernel does not write."""
    out = torch.full_like(batch.query, 7.0) if out is None else out

    def poisoned(*shape, device):
        return torch.full(shape, float("nan"), device=device)

    with (
        mock.patch.object(
            launch, "compile_kernel", lambda kernel: partial(flash_attention_4, kernel)
        ),
        mock.patch.object(launch, "_scratch", poisoned),
    ):
        arguments = batch.arguments(
            AttentionOptions(0.3, window=Window(**windows)),
            max_query_len=max(batch.query.shape[0], 1),
            max_seq_len=int(batch.seq_lens.max()),
        )
        launch.launch(capability, *arguments, out, num_splits=num_splits)
    return out


@st.composite
def batches(draw):
    """Draw query rows, keys and causal rows of sequences that are in no split, some or all."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        query_len = draw(st.integers(0, 4))
        context = draw(st.one_of(st.just(0), st.integers(0, 4 * MIN_SPLIT_KEYS)))
        rows.append((query_len, query_len + context, draw(st.integers(0, query_len))))
    return rows


@settings(max_examples=25, deadline=None)
@given(
    batches(),
    st.sampled_from([16, 48]),
    st.integers(2, 8),
    st.sampled_from([9, 10]),
    st.sampled_from([(-1, -1, "canvas"), (300, -1, "canvas"), (400, 5, "query")]),
    st.sampled_from([(4, 2), (6, 2), (3, 3)]),
)
@example([(3, 1300, 1), (0, 0, 0), (2, 2, 0)], 16, 4, 9, (-1, -1, "canvas"), (16, 2))
# Three key tiles in a window, and five splits of the sequence: two of them are empty.
@example([(4, 1500, 0)], 16, 8, 10, (300, -1, "canvas"), (4, 2))
@example([(3, 0, 0), (2, 700, 0)], 16, 3, 9, (-1, -1, "canvas"), (4, 2))
def test_splits_folded(rows, block_size, num_splits, capability, window, heads):
    """Combined splits equal one walk over all keys, and other rows are unchanged."""
    batch = make_canvas_batch(
        *zip(*rows, strict=True),
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=16,
        block_size=block_size,
        padded_rows=2,
    )
    windows = dict(zip(("left", "right", "anchor"), window, strict=True))
    got = attend_in_splits(batch, num_splits, capability, **windows)
    tensors = batch.tensors()
    for name in ("query", "key_cache", "value_cache"):
        tensors[name] = tensors[name].double()
    exact = attend(**tensors, **windows, scale=0.3, impl="reference")
    live = slice(batch.num_live_tokens)
    torch.testing.assert_close(got[live].double(), exact[live], rtol=1e-5, atol=1e-5)
    assert (got[batch.num_live_tokens :] == 7.0).all()


def test_splits_folded_in_bf16():
    """Splits of bf16 rows are combined in float32 and rounded once, into rows of any stride."""
    batch = make_canvas_batch([4], [1300], [0], head_dim=16, dtype=torch.bfloat16)
    out = torch.empty(4, 4, 32, dtype=torch.bfloat16)[..., :16]
    got, whole = attend_in_splits(batch, 4, 9, out=out), attend_in_splits(batch, 1, 9)
    torch.testing.assert_close(got, whole, rtol=2**-7, atol=2**-9)


def bounded(max_seq_len):
    """Return sequences of which only the bounds count."""
    nothing = torch.empty(0, dtype=torch.int32)
    return Sequences(*[nothing] * 4, max_query_len=256, max_seq_len=max_seq_len)


def query_shape(canvases, head_dim):
    return canvases * 256, 16, head_dim


@pytest.mark.parametrize(
    ("capability", "head_dim", "group", "window", "counts"),
    [
        (9, 512, 8, -1, {1: 2, 2: 1, 3: 2, 4: 1, 8: 1}),
        (9, 256, 2, 1023, {1: 4, 2: 2, 3: 1, 4: 1, 8: 1}),
        (10, 256, 2, 1023, {1: 4, 2: 2, 3: 1, 4: 1, 8: 1}),
    ],
)
def test_splits_of(capability, head_dim, group, window, counts):
    """There are as many splits as in Triton with tiles as large, for 132 processors."""
    kernel = launch.CuteKernel(
        *(capability, head_dim, group, torch.bfloat16, 0.0, window >= 0, False, True, False)
    )
    options = AttentionOptions(1.0, window=Window(window))
    for canvases, expected in counts.items():
        # A graph is captured for the longest context, and is cut as one for a short context.
        for longest in (4096, 131072):
            found = launch.splits_of(
                kernel, query_shape(canvases, head_dim), 132, options, bounded(longest)
            )
            assert found == expected, f"{canvases} canvases"
        shape = query_shape(canvases, head_dim)
        assert launch.splits_of(kernel, shape, 132, options, bounded(300)) == 1
        whole = replace(options, most_splits=1)
        assert launch.splits_of(kernel, shape, 132, whole, bounded(4096)) == 1


def test_splits_launched_unread():
    """A launch follows from shapes alone, so no value of the batch is read on the host."""

    query, cache = (
        empty(*s, dtype=torch.bfloat16) for s in (query_shape(1, 512), (64, 16, 2, 512))
    )
    launched, combined = mock.Mock(), mock.Mock()
    with (
        mock.patch.object(launch, "compile_kernel", return_value=launched) as compiled,
        mock.patch.object(launch, "multiprocessors", return_value=132),
        mock.patch("attention_kernels.canvas_attention.cute.combine.combine_splits", combined),
    ):
        launch.launch(
            9,
            query,
            PagedCache(cache, cache),
            Sequences(
                *(empty(1, 64), empty(2), empty(1), empty(1)), max_query_len=256, max_seq_len=131072
            ),
            AttentionOptions(0.1),
            query,
        )
    assert compiled.call_args.args[0].split
    part, lse = launched.call_args.args[3:5]
    assert (part.shape, lse.shape) == ((2, 256, 16, 512), (2, 16, 256))
    assert combined.call_args.args[:2] == (part, lse)


@pytest.mark.parametrize("most_splits", [1, 4])
def test_splits_bounded(most_splits):
    """The bound of a layer reaches the launch, and with 1 nothing is split."""
    batch = make_canvas_batch([4], [8], [2], head_dim=256, dtype=torch.bfloat16)
    tensors = {name: tensor for name, tensor in batch.tensors().items() if tensor is not None}
    with mock.patch.object(launch, "attend") as run:
        attend(**tensors, impl="cute", most_splits=most_splits)
    assert run.call_args.args[3].most_splits == most_splits
    assert not run.call_args.kwargs


def test_warm_up():
    """A start compiles both kernels of a layer, and one in a batch-invariant server."""
    batch = make_canvas_batch([1], [1], [0], head_dim=256, dtype=torch.bfloat16)
    for most_splits, cut in ((8, [False, True]), (1, [False])):
        with (
            mock.patch.object(launch, "compile_kernel") as compiled,
            mock.patch.object(launch, "attend", partial(launch.launch, 9)),
        ):
            warm_up_canvas_attention(
                batch.query,
                PagedCache(batch.key_cache, batch.value_cache),
                AttentionOptions(0.1, window=Window(3), most_splits=most_splits),
                impl="cute",
            )
        assert [call.args[0].split for call in compiled.call_args_list] == cut
        for call in compiled.return_value.call_args_list:
            # No rows: the first number is where the only sequence starts, the second where it ends.
            assert call.args[6].tolist() == [0, 0]
