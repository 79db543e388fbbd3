"""Rooms that register themselves: entry points of this package, which other rooms load by group."""

from __future__ import annotations

from importlib.metadata import EntryPoints, distribution


def own_entry_points(group: str) -> EntryPoints:
    """Entry points of one of this package's own groups.

    Args:
        group: ``"vllm_diffusion.extensions"``, functions that the plugin calls in each process;
            ``"vllm_diffusion.commands"``, modules with an ``add_parser``; or
            ``"vllm_diffusion.cpu_kernels"``, what the CPU platform runs in place of Triton kernels.
    """
    return distribution("vllm-diffusion").entry_points.select(group=group)
