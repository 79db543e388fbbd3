"""Tests of the attention mask against the figures of the vLLM post, key by key."""

import pytest
import torch
from torch import Tensor

from attention_kernels.canvas_attention import Window
from tests.support.oracles.kernel_checks import visibility_mask

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


def drawn(figure: str) -> Tensor:
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
