"""Into how many splits the keys of a launch are cut, by arithmetic on the host.

A split runs as a program of its own, and a second kernel folds what they found. How many are
launched follows from the rows of a pass and its window, so that a graph captured for the longest
context is cut as one for a short context; how many of them a sequence uses, from its own length, on
the device.
"""

import torch

# Most pieces that the keys of a tile are cut into where nobody asks for fewer, and the fewest keys
# of a piece.
MAX_SPLITS = 8
MIN_SPLIT_KEYS = 320
# What writing and folding a partial takes, in keys. It is twice 128 KiB for 64 rows of 512 or 128
# of 256, about 9 us at a multiprocessor's share of an H100's memory; a key of these takes about 40
# ns.
PARTIAL_KEYS = 256
# How long a sequence is taken for without a window: a graph is captured for any length.
LONG_KEYS = 8192
# The most fp32 scratch of a launch.
SCRATCH_BYTES = 256 * 2**20


def multiprocessors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; 1 elsewhere, where programs run in sequence."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def longest_tile(window_left: int, max_query_len: int) -> int:
    """Keys of a query tile, as far as splits go: what its window reaches, or ``LONG_KEYS``."""
    return LONG_KEYS if window_left < 0 else window_left + max_query_len


def splits(programs: int, at_once: int, keys: int, partial_bytes: int, most: int) -> int:
    """Return the number of pieces of a tile's keys, so that a GPU is neither idle nor busy folding.

    Args:
        programs: Programs of a launch in which every tile is in one piece.
        at_once: Programs that the GPU runs at once.
        keys: Keys of the longest tile.
        partial_bytes: Scratch bytes of a piece.
        most: Most pieces.

    Returns:
        The smallest number with the least time. The time is the number of rounds of programs on the
        GPU, times the keys of a piece and the cost of its partial. The number is 1 if whole tiles
        fill the GPU one and a half times: little of two rounds is idle then.
    """
    if programs >= 1.5 * at_once:
        return 1

    def time(pieces: int) -> float:
        rounds = -(-programs * pieces // at_once)
        return rounds * (keys / pieces + (PARTIAL_KEYS if pieces > 1 else 0))

    most = max(1, min(most, SCRATCH_BYTES // max(1, programs * partial_bytes)))
    return min(range(1, most + 1), key=time)
