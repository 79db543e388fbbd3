"""Tile sizes of the kernels: one configuration for each chip, head size and dtypes."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor


@dataclass(frozen=True)
class TritonConfig:
    """Tile sizes of the kernel. With the sequence they fix its output."""

    block_m: int  # rows of a query tile, tokens times heads of a group
    block_n: int  # keys of a tile
    num_warps: int
    num_stages: int
    parts: int = 1  # of a head's values, in programs that compute the same scores
    programs: int = 1  # that run on a multiprocessor at once, as far as splits go


# Chosen without a GPU, from what the compiler reports (`python tests/kernels/test_ahead_of_time.py
# sm_90`): the fewest estimated cycles a key, issued or of tensor cores, within the chip's shared
# memory and without spills (that file names one that spills, with a shorter loop). Keyed by chip,
# then by the padded head size; smaller heads take the entry of 64. CONFIGS.md has the counts for
# 512.
_CONFIGS = {
    # 163 KB of shared memory.
    "sm_80": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(128, 64, 8, 2),
        256: TritonConfig(64, 32, 4, 2, programs=2),
        512: TritonConfig(64, 32, 8, 2),
    },
    # sm_86, sm_89: 99 KB.
    "small": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(64, 64, 4, 2),
        256: TritonConfig(64, 32, 8, 2),
        512: TritonConfig(64, 16, 8, 2),
    },
    # 99 KB.
    "sm_120": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(64, 64, 4, 2),
        256: TritonConfig(64, 32, 8, 2),
        512: TritonConfig(32, 32, 8, 2),
    },
    # 227 KB.
    "sm_90": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(128, 64, 8, 2),
        # A warp group for each half of the rows: half the instructions a key that 64 rows take.
        256: TritonConfig(128, 64, 8, 3),
        # The same, and each half of the values: the scores are computed twice. Warp groups that
        # share them take as many cycles (docs/develop/internals.md). With a third stage the numbers
        # of cache blocks are read a tile ahead of the keys that they lead to.
        512: TritonConfig(128, 32, 8, 3, parts=2),
    },
    # 227 KB.
    "sm_100": {
        64: TritonConfig(64, 64, 4, 2),
        128: TritonConfig(128, 64, 8, 2),
        256: TritonConfig(128, 64, 8, 2),
        512: TritonConfig(64, 32, 8, 2),
    },
}
# Bytes pass through registers on their way to shared memory, which larger tiles have not got.
_FP8_CONFIGS = {
    128: TritonConfig(64, 64, 8, 2),
    256: TritonConfig(64, 32, 8, 2),
    512: TritonConfig(32, 32, 8, 2),
}
_FP8_CONFIGS_OF_CHIP = {
    ("sm_90", 256): TritonConfig(128, 64, 8, 2),
    ("sm_100", 256): TritonConfig(64, 64, 8, 2),
}
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
    """Return the configuration for a head size and dtypes on a GPU of this compute capability."""
    if query_dtype == torch.float32:
        return _FP32_CONFIG
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
    padded = max(64, triton.next_power_of_2(head_dim))
    if cache_dtype != query_dtype:
        padded = max(128, padded)
        return _FP8_CONFIGS_OF_CHIP.get((chip, padded), _FP8_CONFIGS[padded])
    return _CONFIGS[chip][padded]


def choose_config(query: Tensor, cache_dtype: torch.dtype) -> TritonConfig:
    """Return the tuned configuration for these inputs on their device."""
    if query.device.type != "cuda":
        return _INTERPRETER_CONFIG
    capability = torch.cuda.get_device_capability(query.device)
    return tuned_config(query.shape[2], query.dtype, cache_dtype, capability)
