"""Give memory of tensors back to the system and keep their addresses.

What a sleeping server holds on a CPU: as vLLM's allocator does on a GPU, everything stays where it is,
views and all, but for what it contains.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

from torch import Tensor

_LIBC = ctypes.CDLL(None, use_errno=True)
_MADVISE = _LIBC.madvise
_MADVISE.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def discard(tensors: Iterable[Tensor]) -> int:
    """Forget what these tensors hold; until it is written again, it is zero.

    What shares a page with something else is set to zero, and stays.

    Args:
        tensors: On the CPU, in memory of this process alone. Those that share a storage count once.

    Returns:
        Bytes that were given back.
    """
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
    given_back = 0
    for begin, storage in storages.items():
        end = begin + storage.nbytes()
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first >= last:
            ctypes.memset(begin, 0, end - begin)
            continue
        ctypes.memset(begin, 0, first - begin)
        ctypes.memset(last, 0, end - last)
        if _MADVISE(first, last - first, mmap.MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), "madvise failed")
        given_back += last - first
    return given_back
