"""Costs of a server's processes: memory of the machine and of its GPUs, and processor time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from vllm_diffusion.startup.machine import working_accelerator


def peak_resident_bytes(process: int) -> int:
    """Return the most that a process had in memory, shared pages included; 0 where that is not known."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def processor_seconds(processes: Sequence[int]) -> float:
    """Sum the seconds of all cores that processes have used; those that have ended count nothing."""
    total = 0.0
    for process in processes:
        with suppress(psutil.Error):
            times = psutil.Process(process).cpu_times()
            total += times.user + times.system
    return total


def device_bytes(processes: Sequence[int]) -> int | None:
    """Sum the memory of processes on GPUs: 0 on a machine without one, ``None`` where it is not known."""
    if working_accelerator() is None:
        return 0
    try:
        from vllm.utils.import_utils import import_pynvml

        nvml = import_pynvml()
        nvml.nvmlInit()
        try:
            devices = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
            used = [
                each.usedGpuMemory
                for device in devices
                for each in nvml.nvmlDeviceGetComputeRunningProcesses(device)
                if each.pid in processes
            ]
        finally:
            nvml.nvmlShutdown()
    except Exception:
        # No driver, or one that does not tell.
        return None
    return sum(used) if used and None not in used else None
