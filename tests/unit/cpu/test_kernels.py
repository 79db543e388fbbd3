"""Each NumPy function that samples, verifies or drafts writes what the Triton kernel that it replaces writes.

Those of the runner's tables and positions are in the way of every engine that a test starts here.
The kernels run under Triton's interpreter, so this file needs a process in which it is on.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).with_name("check_cpu_drafts.py")


@pytest.mark.engine
def test_against_the_triton_kernels():
    """Run in a fresh process, where our CPU platform has turned the interpreter on."""
    result = subprocess.run(
        [sys.executable, str(CHECKS)], capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stderr[-4000:]
    assert "10 kernels agree" in result.stdout
