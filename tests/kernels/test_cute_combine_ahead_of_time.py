"""The kernel that combines the splits of ``impl="cute"`` compiles within registers.

Triton compiles for a chip that is not there only in a process without its interpreter: this file's.
"""

import json

import pytest
import torch

from tests.support.counters.triton_compile import compile_for, empty, recorded, run_uninterpreted

CHIPS = ("sm_90", "sm_100")


def recorded_launch(head_dim: int) -> tuple:
    """Return the launch for a canvas in two splits, on tensors without memory."""
    from attention_kernels.canvas_attention.cute import combine

    out = empty(256, 16, head_dim, dtype=torch.bfloat16)
    parts, sums = (empty(*shape, dtype=torch.float32) for shape in ((2, *out.shape), (2, 16, 256)))
    with recorded() as launches:
        combine.combine_splits(parts, sums, empty(2), empty(1), out)
    (launch,) = launches
    return launch


def test_combine_ahead_of_time():
    """Both head sizes compile without a spill, for several programs per multiprocessor."""
    pytest.importorskip("triton")
    lines = run_uninterpreted(__file__)
    assert len(lines) == 2 * len(CHIPS)
    for line in lines:
        assert line["spilled_bytes"] == 0, line
        # Of 65,536, 128 threads each.
        assert line["registers"] <= 128, line


if __name__ == "__main__":
    for chip in CHIPS:
        for head_dim in (256, 512):
            print(json.dumps(compile_for(chip, *recorded_launch(head_dim))))
