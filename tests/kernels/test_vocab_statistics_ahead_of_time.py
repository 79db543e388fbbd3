"""The kernel of the vocabulary's statistics compiles for every chip without spilling registers.

As ``test_ahead_of_time.py``, in a process without Triton's interpreter. By hand:

    PYTHONPATH=. python tests/kernels/test_vocab_statistics_ahead_of_time.py sm_90
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.support.triton_compile import SHARED_MEMORY, compile_for

# Logits as projected and as adjusted, with and without a cap and weights.
CASES = [
    (torch.bfloat16, 30.0, torch.bfloat16),
    (torch.bfloat16, None, None),
    (torch.float32, None, torch.bfloat16),
    (torch.float16, 30.0, torch.float16),
    (torch.float32, None, torch.float32),
]


def recorded_launch(dtype, softcap, weights_dtype) -> tuple:
    """The kernel with its arguments, on tensors without memory."""
    from attention_kernels.vocab_statistics import triton as kernels
    from attention_kernels.vocab_statistics.running import RowDraws, RunningStatistics

    launches = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **kwargs: launches.append((args, kwargs))

    device = torch.device("meta")
    rows, ids = 256, 4096
    number = torch.empty(rows, device=device)
    integer = torch.empty(rows, dtype=torch.int32, device=device)
    weights = (
        None
        if weights_dtype is None
        else torch.empty(rows, ids, dtype=weights_dtype, device=device)
    )
    kernel = kernels._update_statistics_kernel
    with mock.patch.object(kernels, "_update_statistics_kernel", Recorder()):
        kernels.update_statistics_triton(
            RunningStatistics.empty(rows, device),
            torch.empty(rows, ids, dtype=dtype, device=device),
            4096,
            RowDraws(number, number, integer.long(), integer, integer, integer),
            softcap,
            weights,
        )
    ((args, kwargs),) = launches
    return kernel, args, kwargs


@pytest.mark.parametrize("chip", SHARED_MEMORY)
def test_vocab_statistics_ahead_of_time(chip):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    result = subprocess.run(
        [sys.executable, __file__, chip],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(lines) == len(CASES)
    for line in lines:
        assert line["spilled_bytes"] == 0, line
        assert line["shared_memory"] <= SHARED_MEMORY[chip], line


if __name__ == "__main__":
    for case in CASES:
        print(json.dumps(compile_for(sys.argv[1], *recorded_launch(*case))), flush=True)
