"""Checks that a kernel, executed on a device, computes what PyTorch's reference does.

Each check runs one implementation on small random inputs of a given shape and holds it to float64:
attention may be twice, statistics four times as far from it as the reference is in its own dtype.
Words of the noise are equal.
"""

from attention_kernels.checks.attention import AttentionShape, check_attention
from attention_kernels.checks.device import Checked, check_device, check_noise
from attention_kernels.checks.sampled_rows import RowsShape, check_kept_rows, check_statistics

__all__ = [
    "AttentionShape",
    "Checked",
    "RowsShape",
    "check_attention",
    "check_device",
    "check_kept_rows",
    "check_noise",
    "check_statistics",
]
