"""Refuses the CPU platform's modules in every Python process on the null GPU.

Python imports this file at its start, from the folder that ``processes.environment`` puts on its
path: also in the processes that vLLM spawns. Importing vLLM's CPU worker replaces torch's CUDA
streams, events and memory figures in the process that does it, and nothing of a CPU platform
belongs into a process on a GPU.
"""

import sys
from importlib.abc import MetaPathFinder

CPU_PLATFORMS = ("vllm.v1.worker.cpu", "vllm.platforms.cpu", "vllm_diffusion.cpu.")


class CpuPlatformImportedError(BaseException):
    """An error that is not an ``Exception``, so that code without the import does not catch it."""


class RefuseCpuPlatforms(MetaPathFinder):
    """Finds nothing, and lets no other finder have those modules."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith(CPU_PLATFORMS):
            raise CpuPlatformImportedError(f"{fullname} is imported in a process on a GPU")


sys.meta_path.insert(0, RefuseCpuPlatforms())
