"""Limits of a GPU's memory and tensor cores, by its data sheet."""

from __future__ import annotations

import torch

# Dense bf16 operations with sums in float32 of a multiprocessor in a clock, by compute capability.
OPERATIONS_A_CLOCK = {
    (8, 0): 2048,
    (8, 6): 512,
    (8, 9): 512,
    (9, 0): 4096,
    (10, 0): 8192,
    (12, 0): 512,
}


def share_of_limits(num_bytes: int, operations: int, seconds: float) -> float | None:
    """Return how much of its memory's or tensor cores' limit a call reaches, of the nearer one.

    Args:
        num_bytes: Bytes that it must read and write.
        operations: Operations of its matrix products.
        seconds: Its time.

    Returns:
        A number up to about 1; ``None`` where the limits of this GPU are not known.
    """
    if not torch.cuda.is_available():
        return None
    gpu = torch.cuda.get_device_properties()
    rate = OPERATIONS_A_CLOCK.get((gpu.major, gpu.minor))
    # Clocks are in kHz; memory transfers twice in one.
    memory = 2e3 * gpu.memory_clock_rate * gpu.memory_bus_width / 8
    if rate is None or memory <= 0:
        return None
    cores = rate * gpu.multi_processor_count * 1e3 * gpu.clock_rate
    return round(max(num_bytes / memory, operations / cores) / seconds, 3)
