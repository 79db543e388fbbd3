"""Rows of a product do not depend on how many rows there are."""

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from vllm_diffusion.cpu import linear as cpu_linear
from vllm_diffusion.cpu.linear import linear

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("out_size", "in_size"),
    [(256, 128), (128, 256), (320, 128), (4, 96), (512, 300), (300, 512), (1536, 129)],
)
def test_rows_do_not_depend_on_their_number(out_size, in_size, dtype):
    """A row of a product has the same bits for any number of rows around it."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(out_size, in_size, generator=generator).to(dtype)
    rows = torch.randn(300, in_size, generator=generator).to(dtype)
    whole = linear(rows, weight)
    for count in (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 63, 64, 65, 100, 256):
        assert torch.equal(linear(rows[:count], weight), whole[:count])
        assert torch.equal(linear(rows[7 : 7 + count], weight), whole[7 : 7 + count])


@pytest.mark.parametrize(("out_size", "in_size"), [(5, 8), (512, 300)])
def test_is_a_linear_layer(out_size, in_size):
    """The product equals PyTorch's linear layer, also for no rows, for rows apart from one another,
    and for a weight that is an embedding's tile on its side.
    """
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(2, 3, in_size),
        torch.randn(out_size, in_size),
        torch.randn(out_size),
    )
    for matrix in (weight, weight.T.contiguous().T):
        for rows in (x, x[:, :1], x[:, ::2]):
            expected = F.linear(rows, matrix, bias)
            torch.testing.assert_close(linear(rows, matrix, bias), expected, atol=1e-4, rtol=0)
        assert linear(x[:0], matrix).shape == (0, 3, out_size)


@pytest.mark.parametrize(
    ("out_size", "dtype", "by_onednn"),
    [(512, torch.float32, True), (8, torch.float32, False), (512, torch.float16, False)],
)
def test_large_float32_weights_go_to_onednn(out_size, dtype, by_onednn):
    """A float32 weight goes to oneDNN by its own size alone, whatever the number of rows."""
    for num_rows in (1, 40):
        rows, weight = (
            torch.zeros(num_rows, 300, dtype=dtype),
            torch.zeros(out_size, 300, dtype=dtype),
        )
        with profile(activities=[ProfilerActivity.CPU]) as calls:
            linear(rows, weight)
        names = {event.key for event in calls.key_averages()}
        assert ("mkldnn::_linear_pointwise" in names) == by_onednn


@pytest.fixture(autouse=True)
def _operators() -> None:
    cpu_linear.register()
    # Nothing is defined twice.
    cpu_linear.register()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    """RMSNorm is right with one weight for all rows and with one for each first index."""
    from vllm.ir import ops

    torch.manual_seed(0)
    x = torch.randn(3, 5, 2, 16).to(dtype)
    weights = torch.randn(3, 16).to(dtype)
    expected = torch.stack(
        [ops.rms_norm(x[group], weights[group], 1e-6) for group in range(len(x))]
    )
    result = torch.empty_like(x)
    torch.ops._C.rms_norm(result, x, weights, 1e-6)
    assert torch.equal(result, expected)
    torch.ops._C.rms_norm(result[1], x[1], weights[1], 1e-6)
    assert torch.equal(result[1], expected[1])
    torch.ops._C.rms_norm(result, x, None, 1e-6)
    assert torch.equal(result, ops.rms_norm(x, None, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotary_embedding(rotary_dim: int, is_neox: bool, dtype: torch.dtype) -> None:
    """Rotary embedding works in place, with and without a key, on whole or partial heads."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    torch.manual_seed(0)
    inverse_frequency = 1 / 10000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.outer(torch.arange(40.0), inverse_frequency)
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
    positions = torch.tensor([3, 0, 39, 7])
    query, key = torch.randn(4, 64).to(dtype), torch.randn(4, 32).to(dtype)
    expected = RotaryEmbedding.forward_static(
        positions, query.clone(), key.clone(), 16, rotary_dim, cache, is_neox
    )
    ours = query.clone(), key.clone()
    torch.ops._C.rotary_embedding(positions, *ours, 16, cache, is_neox)
    assert torch.equal(ours[0], expected[0])
    assert torch.equal(ours[1], expected[1])
    alone = key.clone()
    torch.ops._C.rotary_embedding(positions, alone, None, 16, cache, is_neox)
    assert torch.equal(alone, expected[1])
    torch.ops._C.rotary_embedding(positions, *ours, 16, cache, is_neox, 0, True)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(ours[0], query, atol=tolerance, rtol=tolerance)
