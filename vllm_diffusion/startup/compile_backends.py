"""Back ends of ``torch.compile`` for what runs around the backbone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_diffusion.startup.machine import has_cpp_compiler

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
