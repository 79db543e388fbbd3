"""Rows of a product do not depend on how many rows there are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vllm_diffusion.cpu.linear import linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("out_size", "in_size"), [(256, 128), (128, 256), (320, 128), (4, 96)])
def test_rows_do_not_depend_on_their_number(out_size, in_size, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_size, in_size, generator=generator).to(dtype)
    rows = torch.randn(300, in_size, generator=generator).to(dtype)
    whole = linear(rows, weight)
    for count in (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 63, 64, 65, 100, 256):
        assert torch.equal(linear(rows[:count], weight), whole[:count])
        assert torch.equal(linear(rows[7 : 7 + count], weight), whole[7 : 7 + count])


def test_is_a_linear_layer():
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(5, 8), torch.randn(5)
    assert torch.allclose(linear(x, weight, bias), F.linear(x, weight, bias), atol=1e-5)
    assert linear(x[:0], weight).shape == (0, 3, 5)
