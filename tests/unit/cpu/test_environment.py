"""Tests of the environment that a CPU server sets before vLLM is imported."""

import subprocess
import sys

import pytest

# A process that imports vLLM.
pytestmark = [pytest.mark.engine, pytest.mark.slow]

# The engine's import of what it quantises with, and the processes that it leaves running.
CODE = """
import psutil
from vllm.platforms import current_platform
assert current_platform.is_cpu()
import humming.ops.utils, humming.utils.nvrtc
names = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
print([name for name in names if "humming" in name])
"""


def test_no_background_builds() -> None:
    """Importing vLLM's quantization starts no process that imports torch again."""
    command = [sys.executable, "-c", CODE]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert ended.stdout.splitlines()[-1] == "[]"
