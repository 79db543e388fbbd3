"""Each NumPy function writes what the Triton kernel that it replaces writes.

The kernels run under Triton's interpreter, so this file needs a process in which it is on.
"""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("check_cpu_kernels.py")


@pytest.mark.engine
@pytest.mark.slow
def test_against_the_triton_kernels():
    """Every function equals its Triton kernel in a fresh process that interprets the kernels."""
    result = subprocess.run(
        [sys.executable, str(CHECKS)], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert "21 kernels agree" in result.stdout
