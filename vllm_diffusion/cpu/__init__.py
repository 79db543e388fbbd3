"""Decide whether this machine is served by our CPU platform.

vLLM calls :func:`cpu_platform_plugin` in every process, before anything else of the engine is
imported, so this module imports nothing heavy and never raises.
"""

import os
import sys
from typing import Any

_CPU_PLATFORM = "vllm_diffusion.cpu.platform.DiffusionCpuPlatform"
# The module of vLLM's commands. A script that uses ``vllm.LLM`` does not import it.
_COMMAND = "vllm.entrypoints.cli.main"


def cpu_platform_plugin() -> str | None:
    """The CPU platform's class path where it should serve, else ``None``.

    ``None`` when disabled (``VLLM_DIFFUSION_DISABLE=1``), when vLLM is itself a CPU build, and when
    any accelerator works. ``VLLM_DIFFUSION_CPU=1`` chooses the CPU whatever is there.
    """
    from vllm_diffusion.startup.environment import compile_once, forces_cpu, is_disabled

    if is_disabled():
        return None

    from vllm_diffusion.startup import machine as detection

    if detection.is_vllm_cpu_build():
        return None
    if not forces_cpu() and detection.working_accelerator() is not None:
        return None

    # The runner's small Triton kernels run under Triton's interpreter. An empty
    # CUDA_VISIBLE_DEVICES tells vLLM that finding no Triton driver is intended.
    _interpret_triton()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # A library of vLLM's for quantised GPU kernels starts two processes whenever it is imported,
    # which import torch to see what they could compile for a GPU: a third of a start's processor
    # time.
    os.environ.setdefault("HUMMING_DISABLE_PARALLEL_BUILD", "1")
    if _COMMAND in sys.modules:
        # By now vLLM has imported torch, and half of what it imports at a start.
        compile_once()
        # The engine's process begins with what the command has imported. The command has vLLM spawn
        # it, for the sake of accelerators, unless the variable is set by then.
        os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    return _CPU_PLATFORM


def _interpret_triton() -> None:
    """Interpret every Triton kernel of this process and its children. Safe to call twice.

    Triton decides between compiling and interpreting when ``@triton.jit`` decorates a function, and
    ``import vllm`` imports Triton (through torch) before it asks for a platform. The functions of
    Triton's own library that were decorated by then are decorated anew, as interpreted ones.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    if "triton.language" not in sys.modules:
        return
    from triton.language.core import tensor
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    interpreted: dict[int, Any] = {}

    def replace_in(owner: Any) -> None:
        for name, value in list(vars(owner).items()):
            if isinstance(value, JITFunction):
                if id(value) not in interpreted:
                    interpreted[id(value)] = InterpretedFunction(value.fn)
                setattr(owner, name, interpreted[id(value)])

    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("triton."):
            replace_in(module)
    replace_in(tensor)
