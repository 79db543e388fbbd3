"""The chips that kernels are compiled for ahead of time."""

import pytest

from tests.support.triton_compile import SHARED_MEMORY


def chips(*often: str) -> list:
    """Every chip as a parameter; all but these with the slow tests."""
    return [
        pytest.param(chip, marks=() if chip in often else pytest.mark.slow)
        for chip in SHARED_MEMORY
    ]
