"""FP8 and NVFP4 on the CPU equal what compressed-tensors and vLLM's own references compute."""

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_diffusion.cpu.quantized_values import (
    FP8,
    quantize_fp8,
    quantize_fp8_groups,
    quantize_nvfp4,
    round_to_e2m1,
    unpack_fp8_blocks,
    unpack_nvfp4,
)

shapes = st.tuples(st.integers(0, 5), st.integers(1, 6).map(lambda groups: 16 * groups))
# Below these, vLLM's kernels stop at a smallest scale, which compressed-tensors does not have.
magnitudes = st.sampled_from([0.05, 1.0, 300.0])


def random_rows(shape: tuple[int, int], magnitude: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * magnitude


@given(shapes, magnitudes, st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_fp8_by_token(shape, magnitude, seed):
    """FP8 by token equals compressed-tensors' quantization within a rounding of the scale."""
    x = random_rows(shape, magnitude, seed)
    values, scale = quantize_fp8(x)
    if x.numel() == 0:
        assert values.shape == x.shape
        return
    args = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"]).input_activations
    their_scale, zero = compute_dynamic_scales_and_zp(x[None], args, torch.nn.Module())
    theirs = fake_quantize(x[None], their_scale, zero, args)[0]
    assert torch.allclose(values * scale, theirs, rtol=1e-6, atol=0)


@given(shapes, magnitudes, st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_static_fp8(shape, magnitude, seed):
    """Static FP8 has one scale, and larger values are clipped to the largest number."""
    x = random_rows(shape, magnitude, seed)
    scale = torch.tensor(magnitude / 200)
    values, same = quantize_fp8(x, scale)
    assert same is scale
    expected = (x / scale).clamp(-448, 448).to(FP8).float()
    assert torch.equal(values, expected)


@pytest.mark.parametrize("magnitude", [0.05, 3.0, 300.0])
def test_nvfp4(magnitude):
    """NVFP4 activations equal vLLM's reference, except for the order of two multiplications."""
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as theirs

    x = random_rows((40, 160), magnitude, 1)
    global_scale = 448 * 6 / (x.abs().max() * 1.5)
    values, scales = theirs.ref_nvfp4_quant(x, global_scale, 16)
    expected = values.float().view(40, -1, 16) * scales.float().view(40, -1, 1)
    assert torch.equal(quantize_nvfp4(x, global_scale).view(40, -1, 16), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_weights(dtype):
    """Every packed byte is read in the same order of numbers as by compressed-tensors."""
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scales = (torch.rand(4, 8) * 400).to(FP8)
    expected = unpack_fp4_from_uint8(packed, 4, 128, torch.float32)
    expected = expected * scales.float().repeat_interleave(16, dim=-1)
    ours = unpack_nvfp4(packed, scales, dtype)
    # Exact in bfloat16 as well.
    assert torch.equal(ours.float(), expected)


def test_every_tie_and_neighbour_of_e2m1():
    """E2M1 rounds to the nearest number, and a tie to the even code."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    x = torch.linspace(-7, 7, 5601)
    ours = round_to_e2m1(x)
    distance = (x.abs()[:, None] - grid).abs()
    nearest = distance.amin(-1)
    assert torch.allclose((x.abs() - ours.abs()).abs(), nearest, atol=1e-6)
    middles = (grid[1:] + grid[:-1]) / 2
    codes = torch.searchsorted(grid, round_to_e2m1(middles))
    assert (codes % 2 == 0).all()
    round_trip = pack_fp4_to_uint8(ours[:5600].view(100, 56))
    assert torch.equal(
        unpack_fp4_from_uint8(round_trip, 100, 56, torch.float32).flatten(), ours[:5600]
    )


@pytest.mark.parametrize(
    "values", [torch.zeros(3, 32), torch.full((3, 32), 1e30)], ids=["0", "1e30"]
)
def test_extremes_stay_finite(values):
    """Quantized extreme values stay finite in FP8 and NVFP4."""
    quantized, scale = quantize_fp8(values)
    assert torch.isfinite(quantized * scale).all()
    assert torch.isfinite(quantize_nvfp4(values, torch.tensor(100.0))).all()


@pytest.mark.parametrize("shape", [(256, 256), (200, 130), (1, 128), (3, 500)], ids=str)
def test_fp8_blocks(shape):
    """A weight with scales by block, whole or partial, is dequantized as by compressed-tensors."""
    scheme = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
    rows, columns = scheme.weights.block_structure
    weight = random_rows(shape, 10.0, 3).to(FP8)
    counts = (-(-shape[0] // rows), -(-shape[1] // columns))
    scales = torch.rand(counts, generator=torch.Generator().manual_seed(4)) + 0.1
    ours = unpack_fp8_blocks(weight, scales, (rows, columns), torch.float32)
    for i in range(shape[0]):
        expected = weight[i].float() * scales[i // rows, torch.arange(shape[1]) // columns]
        assert torch.equal(ours[i], expected)


@given(st.tuples(st.integers(0, 5), st.integers(1, 300)), magnitudes, st.integers(0, 10**6))
@settings(deadline=None, max_examples=60)
def test_fp8_groups(shape, magnitude, seed):
    """Each group has the scale of its own largest entry, as a row has by token."""
    x = random_rows(shape, magnitude, seed)
    ours = quantize_fp8_groups(x, 128)
    assert ours.shape == x.shape
    for begin in range(0, shape[1], 128):
        values, scale = quantize_fp8(x[:, begin : begin + 128])
        assert torch.equal(ours[:, begin : begin + 128], values * scale)
