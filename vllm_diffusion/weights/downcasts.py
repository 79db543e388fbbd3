"""One line of the log for all tensors of a checkpoint that are served in another dtype than
theirs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("vllm.vllm_diffusion")

# The logger and the beginning of vLLM's warning, which it writes for each tensor.
_LOADER = logging.getLogger("vllm.model_executor.models.utils")
_WARNING = "Attempted to load weight %s with dtype %s into"


class _Counted(logging.Filter):
    """Counts vLLM's warnings, and keeps them from the log."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Counter[tuple[str, str]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING or not str(record.msg).startswith(_WARNING):
            return True
        assert isinstance(record.args, tuple)
        _, stored, served = record.args
        self.tensors[str(stored), str(served)] += 1
        return False


@contextmanager
def counted_downcasts() -> Iterator[None]:
    """Have what is loaded within reported by one line for each pair of dtypes, not one a tensor."""
    counted = _Counted()
    _LOADER.addFilter(counted)
    try:
        yield
    finally:
        _LOADER.removeFilter(counted)
    for (stored, served), number in counted.tensors.items():
        logger.info(
            "%d tensors of the checkpoint are %s, and served in %s.", number, stored, served
        )
