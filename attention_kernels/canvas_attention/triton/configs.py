"""How the kernels are cut: one configuration for each chip, head size and dtypes."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor


@dataclass(frozen=True)
class TritonConfig:
    """How the kernel is cut. The output of a sequence is fixed by this and the sequence."""

    block_m: int  # rows of a query tile, tokens times heads of a group
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    # A range of keys is split when it is longer than this. One sliding window of 1024 and a canvas
    # of 256 are not: there, writing and reading partials would cost more than idle cores.
    min_split_keys: int = 2048
    max_splits: int = 8


# Chosen without a GPU, from what the compiler reports: the largest tiles that neither spill
# registers nor pass the chip's shared memory (tests/kernels/test_ahead_of_time.py says of one that
# spills, with a shorter loop). Keyed by chip,
# then by the padded head size; smaller heads take the entry of 64.
_CONFIGS = {
    # 163 KB of shared memory.
    "sm_80": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(128, 64, 8, 2),
        256: TritonConfig(64, 32, 8, 2),
        512: TritonConfig(64, 16, 8, 2, min_split_keys=1024),
    },
    # sm_86, sm_89: 99 KB.
    "small": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(64, 64, 4, 2),
        256: TritonConfig(64, 32, 8, 2),
        512: TritonConfig(64, 16, 8, 2, min_split_keys=1024),
    },
    # 99 KB.
    "sm_120": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(64, 64, 4, 2),
        256: TritonConfig(64, 32, 8, 2),
        512: TritonConfig(32, 32, 8, 2, min_split_keys=1024),
    },
    # 227 KB.
    "sm_90": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(128, 64, 8, 2),
        256: TritonConfig(64, 64, 8, 3),
        512: TritonConfig(64, 32, 8, 2, min_split_keys=1024),
    },
    # 227 KB.
    "sm_100": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(128, 64, 8, 2),
        256: TritonConfig(64, 64, 8, 2),
        512: TritonConfig(64, 32, 8, 2, min_split_keys=1024),
    },
}
# Bytes pass through registers on their way to shared memory, which larger tiles have not got.
_FP8_NARROW_CONFIG = TritonConfig(64, 64, 8, 2)  # heads of up to 128
_FP8_WIDE_CONFIG = TritonConfig(32, 32, 8, 2, min_split_keys=1024)  # heads of more than 256
# fp32 products do not use tensor cores: for comparisons, not for serving.
_FP32_CONFIG = TritonConfig(16, 16, 4, 1)
# Under the interpreter every operation costs the same, so tiles are large.
_INTERPRETER_CONFIG = TritonConfig(64, 64, 4, 1)


def tuned_config(
    head_dim: int,
    query_dtype: torch.dtype,
    cache_dtype: torch.dtype,
    capability: tuple[int, int],
) -> TritonConfig:
    """The configuration for a head size and dtypes on a GPU of this compute capability."""
    if query_dtype == torch.float32:
        return _FP32_CONFIG
    if cache_dtype != query_dtype and not 128 < head_dim <= 256:
        return _FP8_WIDE_CONFIG if head_dim > 256 else _FP8_NARROW_CONFIG
    major, minor = capability
    if major == 9:
        chip = "sm_90"
    elif major in (10, 11):
        chip = "sm_100"
    elif major == 8 and minor in (0, 7):
        chip = "sm_80"
    elif major == 12:
        chip = "sm_120"
    else:
        chip = "small"
    return _CONFIGS[chip][max(64, triton.next_power_of_2(head_dim))]


def choose_config(query: Tensor, cache_dtype: torch.dtype) -> TritonConfig:
    """The tuned configuration for these inputs on their device."""
    if query.device.type != "cuda":
        return _INTERPRETER_CONFIG
    capability = torch.cuda.get_device_capability(query.device)
    return tuned_config(query.shape[2], query.dtype, cache_dtype, capability)
