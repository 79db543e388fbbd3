"""Whether, and by what, the decision of a step is compiled."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def compile_backend(vllm_config: VllmConfig) -> str | None:
    """Backend of ``torch.compile`` for the decision step, ``None`` to run it eagerly.

    Eager where the operator asked for it, and on a CPU without a C++ compiler.
    """
    from vllm.platforms import current_platform

    if vllm_config.model_config.enforce_eager:
        return None
    if current_platform.is_cpu():
        return "inductor" if has_cpp_compiler() else None
    return str(current_platform.simple_compile_backend)


def has_cpp_compiler() -> bool:
    """Whether ``torch.compile`` can build CPU code here: it needs a C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    return shutil.which(compiler) is not None or shutil.which("clang++") is not None
