"""Tests of the attention rule against the figures of the vLLM post, key by key."""

import pytest
import torch
from torch import Tensor

from attention_kernels.canvas_attention import Window
from tests.support.oracles.kernel_checks import visibility_mask

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
        Window(window, window if anchor == "query" else -1, anchor),
    )
    assert torch.equal(mask, drawn(figure))
