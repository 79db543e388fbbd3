"""The chips that kernels are compiled for ahead of time."""

import pytest

from tests.support.counters.triton_compile import SHARED_MEMORY

# What people serve on; the others are slow tests.
_OFTEN = ("sm_90",)

CHIPS = [
    pytest.param(chip, marks=() if chip in _OFTEN else pytest.mark.slow) for chip in SHARED_MEMORY
]
