"""Choice of the compiler for the parts of a pass."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def compile_backend(vllm_config: VllmConfig) -> str | None:
    """Return the backend of ``torch.compile`` for the decision step, ``None`` to run it eagerly.

    It runs eagerly if the operator asks for it, and on a CPU without a C++ compiler.
    """
    from vllm.platforms import current_platform

    if vllm_config.model_config.enforce_eager:
        return None
    if current_platform.is_cpu():
        return "inductor" if has_cpp_compiler() else None
    return str(current_platform.simple_compile_backend)


def launch_backend(vllm_config: VllmConfig) -> str | None:
    """Return the backend for the small functions around a step, ``None`` on a CPU.

    Each computes a few numbers per request or row; compiled, it takes a GPU one launch instead of
    twenty. A CPU has no launches, and would compile for seconds what it runs in microseconds.
    """
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else compile_backend(vllm_config)


def has_cpp_compiler() -> bool:
    """Return true if ``torch.compile`` can build CPU code here: it needs a C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    return shutil.which(compiler) is not None or shutil.which("clang++") is not None
