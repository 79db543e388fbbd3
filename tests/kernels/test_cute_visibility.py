"""Tests of what the CuTe kernels let rows see and what they refuse, without GPU and kernels.

``visibility.py`` is the arithmetic that the kernels trace. Here it runs on host integers and on
tensors; test_cute_ahead_of_time.py runs what the DSL makes of it.
"""

import dataclasses
import re
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.canvas_attention import AttentionOptions, Window
from attention_kernels.canvas_attention.cute import launch
from attention_kernels.canvas_attention.cute.visibility import Visibility
from attention_kernels.testing import make_canvas_batch
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
