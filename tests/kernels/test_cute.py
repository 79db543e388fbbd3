"""Tests of what ``impl="cute"`` lets rows see, of its splits and of what it refuses.

``visibility.py`` is the arithmetic that the kernels trace. Here it runs on host integers and on
tensors; test_cute_ahead_of_time.py runs what the DSL makes of it.

FlashAttention-4 cannot run here. It is replaced by a function of the same signature, in PyTorch,
that writes what the kernel with splits would and leaves everything else NaN; the kernel that
combines them is the one that serves.
"""

import dataclasses
import re
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
from tests.support.counters.triton_compile import empty
from tests.support.oracles.canvas_attention import attend
from tests.support.oracles.kernel_checks import visibility_mask, walk_key_tiles

# tile_m, tile_n and group of the kernels' choices, and small ones that cut short sequences often.
CUTS = [(128, 80, 2), (128, 64, 2), (64, 64, 8), (128, 128, 2), (8, 4, 1), (6, 5, 3), (4, 3, 8)]


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One sequence and its windows; -1 is an open window."""

    query_len: int
    seq_len: int
    causal_rows: int
    window_left: int
    window_right: int
    window_anchor: str

    def visibility(self, **functions) -> Visibility:
        return Visibility(
            self.query_len,
            self.seq_len,
            self.causal_rows,
            None if self.window_left < 0 else self.window_left,
            None if self.window_right < 0 else self.window_right,
            self.window_anchor == "canvas",
            **functions,
        )

    def mask(self) -> torch.Tensor:
        window = Window(self.window_left, self.window_right, self.window_anchor)
        return visibility_mask(self.query_len, self.seq_len, self.causal_rows, window)


@st.composite
def sequences(draw, longest=80):
    query_len = draw(st.integers(1, longest))
    seq_len = draw(st.one_of(st.just(query_len), st.integers(query_len, query_len + 2 * longest)))
    causal = draw(st.one_of(st.just(0), st.just(query_len), st.integers(0, query_len)))
    anchor = draw(st.sampled_from(["canvas", "query"]))
    window = st.one_of(st.just(-1), st.integers(0, longest), st.just(launch.MAX_WINDOW))
    right = draw(window) if anchor == "query" else -1
    return Sequence(query_len, seq_len, causal, draw(window), right, anchor)


@settings(deadline=None)
@given(sequences())
def test_visibility_tensors(sequence):
    """The expressions give the same on tensors as on integers."""
    row = torch.arange(sequence.query_len)

    def smaller(a, b):
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    def larger(a, b):
        return torch.maximum(torch.as_tensor(a), torch.as_tensor(b))

    visible = sequence.visibility(minimum=smaller, maximum=larger)
    lower = torch.as_tensor(visible.lower(row)).expand(sequence.query_len)
    key = torch.arange(sequence.seq_len)
    seen = (key >= lower[:, None]) & (key < visible.upper(row)[:, None])
    assert torch.equal(seen, sequence.mask())


@settings(max_examples=300, deadline=None)
@given(sequences(), st.sampled_from(CUTS))
def test_visibility_tiles(sequence, cut):
    """Every visible key is visited once, no tile in vain, and unmasked tiles hide nothing."""
    tile_m, tile_n, group = cut
    visible, mask = sequence.visibility(), sequence.mask()
    num_tiles = -(-sequence.query_len * group // tile_m)
    for tile in range(num_tiles):
        rows = sorted(
            {pair // group for pair in range(tile * tile_m, (tile + 1) * tile_m)}
            & set(range(sequence.query_len))
        )
        seen = mask[rows]
        first, end = visible.visited(tile, *cut)
        cut_right = max(first, visible.first_cut_right(tile, *cut))
        whole_left = max(first, visible.first_whole_left(tile, *cut))
        visited = walk_key_tiles(first, end, cut_right, whole_left, sequence.window_left >= 0)
        # What loads the tiles counts on this order and number.
        assert [n for n, _ in visited] == list(range(end - 1, first - 1, -1))
        assert not seen[:, : first * tile_n].any()
        assert not seen[:, end * tile_n :].any()
        for n, masked in visited:
            part = seen[:, n * tile_n : (n + 1) * tile_n]
            assert part.any(), "visited in vain"
            assert masked or (part.shape[1] == tile_n and part.all())


@pytest.mark.parametrize("cut", CUTS)
def test_visibility_no_keys(cut):
    """A sequence without keys visits one tile and sees nothing of it."""
    visible = Sequence(7, 0, 3, 5, -1, "canvas").visibility()
    assert visible.visited(0, *cut) == (0, 1)
    assert all(visible.upper(row) == 0 for row in range(7))


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
    tensors = empty(1, 64), empty(2), empty(1), empty(1)
    return Sequences(*tensors, max_query_len=256, max_seq_len=max_seq_len)


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
        shape = query_shape(canvases, head_dim)
        # A graph is captured for the longest context, and is cut as one for a short context.
        for longest in (4096, 131072):
            found = launch.splits_of(kernel, shape, 132, options, bounded(longest))
            assert found == expected, f"{canvases} canvases"
        assert launch.splits_of(kernel, shape, 132, options, bounded(300)) == 1
        whole = dataclasses.replace(options, most_splits=1)
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
            bounded(131072),
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


def batch(head_dim=256, dtype=torch.bfloat16, **options):
    return make_canvas_batch([4], [8], [2], head_dim=head_dim, dtype=dtype, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_cute_without_gpu():
    """Without a GPU ``cute`` is refused by name, with an alternative."""
    with pytest.raises(
        NotImplementedError, match='impl="cute" needs CUDA tensors and got cpu.*imp'
    ):
        attend(**batch().tensors(), impl="cute")


@pytest.mark.parametrize(
    ("capability", "head_dim", "message"),
    [
        ((8, 0), 256, "needs a GPU of compute capability 9.x or 10.x and this one has 8.0"),
        ((12, 0), 256, "needs a GPU of compute capability 9.x or 10.x and this one has 12.0"),
        ((10, 0), 512, "cannot take head_dim 512 on compute capability 10.x: .* tensor memory"),
        ((9, 0), 128, "takes head_dim 256 or 512 on compute capability 9.x and got 128"),
        *[((9, 0), 256, None), ((9, 0), 512, None), ((10, 0), 256, None)],
    ],
)
def test_cute_gpu(capability, head_dim, message):
    """A GPU and head size without kernels is refused with the reason and what runs there."""
    reason = launch.refusal(capability, head_dim)
    if message is None:
        assert reason is None
    else:
        assert re.search(message, reason)
        assert 'impl="triton"' in reason


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dtype": torch.float32}, ValueError, "query has dtype torch.float32; .* torch.bfloat16"),
        ({"head_dim": 128}, ValueError, "query has head_dim 128; .* takes 256 and 512"),
        (
            {"cache_dtype": torch.float8_e4m3fn},
            ValueError,
            "key_cache has dtype torch.float8_e4m3fn; .* torch.bfloat16. Use impl=.triton",
        ),
        ({"row_spans": [(4, 6)] * 4}, NotImplementedError, "row_spans are not built"),
    ],
)
def test_cute_bad_input(changes, error, message):
    """An unsupported input is refused with the argument, its value and what is allowed."""
    given_batch = batch(**changes)
    scales = (1.0, 1.0) if "cache_dtype" in changes else ()
    query, cache, sequences, _ = given_batch.arguments(AttentionOptions(1.0), scales=scales)
    with pytest.raises(error, match=message):
        launch.check_inputs(query, cache, sequences)


@pytest.mark.parametrize(
    ("capability", "source"), [(9, "vLLM 0.33 for CUDA"), (10, r"flash-attn-4==4\.0\.0b36")]
)
def test_cute_not_installed(capability, source):
    """Without the FlashAttention-4 of a GPU, the message names what to install."""
    kernel = launch.CuteKernel(
        capability, 256, 2, torch.bfloat16, 0.0, *(False, False, True, False)
    )
    absent = mock.patch.object(launch.importlib, "import_module", side_effect=ImportError("gone"))
    with (
        absent,
        pytest.raises(NotImplementedError, match=rf'impl="cute" cannot .* {source} \(gone'),
    ):
        launch.compile_kernel(kernel)


def test_cute_misaligned():
    """Rows that do not start on 16 bytes are named, with their strides."""
    rows = torch.zeros(4, 2, 260, dtype=torch.bfloat16)[..., :256]
    with pytest.raises(ValueError, match=r"query starts at .* strides of \[1040, 520\] bytes"):
        launch.check_memory(query=rows)
    launch.check_memory(query=rows.contiguous())
