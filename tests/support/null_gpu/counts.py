"""Counts what a process on the null GPU has requested from the driver."""

import ctypes
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.null_gpu.forks import RUNTIME


def counts_of(call: Callable[[], object]) -> dict[str, int]:
    """Count the driver's calls in ``call``: kernels and copies by name, waits, allocations."""
    reset_counts()
    call()
    return read_counts()


def reset_counts() -> None:
    ctypes.CDLL(RUNTIME).null_gpu_reset_counts()


def read_counts() -> dict[str, int]:
    """Return the driver's calls since the last :func:`reset_counts`."""
    with tempfile.NamedTemporaryFile() as file:
        assert ctypes.CDLL(RUNTIME).null_gpu_write_counts(file.name.encode()) == 0
        lines = Path(file.name).read_text(encoding="utf-8").splitlines()
    return {what: int(number) for number, _, what in (line.partition("\t") for line in lines)}


def summary(counts: dict[str, int]) -> dict[str, int]:
    """Return the counts by kind, as tests compare them with their baselines."""

    def total(start: str) -> int:
        return sum(number for what, number in counts.items() if what.startswith(start))

    pageable = sum(n for what, n in counts.items() if "pageable" in what)
    return {
        "graphs": total("launch of a graph"),
        "kernels": total("kernel "),
        "kernels_in_graphs": total("in a graph: kernel "),
        "copies": total("copy ") + total("blocking copy "),
        "copies_in_graphs": total("in a graph: copy "),
        "pageable_copies": pageable,
        "blocking_copies": total("blocking copy "),
        "memsets": total("memset"),
        "waits_for_events": total("wait for an event"),
        "waits_for_streams": total("wait for a stream"),
        "waits_for_the_device": total("wait for the device"),
        "allocations": total("allocation "),
        "modules": total("load of a module"),
    }
