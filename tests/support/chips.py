"""The chips that kernels are compiled for ahead of time."""

import pytest

from tests.support.triton_compile import SHARED_MEMORY

# These compile as sm_80 does, within the shared memory of sm_120: with the slow tests.
_LESS_OFTEN = ("sm_86", "sm_89")

CHIPS = [
    pytest.param(chip, marks=pytest.mark.slow if chip in _LESS_OFTEN else ())
    for chip in SHARED_MEMORY
]
