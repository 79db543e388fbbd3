"""One line of the log for all tensors of a checkpoint that are served in another dtype than
theirs.
"""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger("vllm.vllm_diffusion")

# The logger and the beginning of vLLM's warning, which it writes for each tensor.
_LOADER = logging.getLogger("vllm.model_executor.models.utils")
_WARNING = "Attempted to load weight %s with dtype %s into"


@contextmanager
def counted_downcasts() -> Iterator[None]:
    """Have what is loaded within reported by one line for each pair of dtypes, not one a tensor."""
    tensors: Counter[tuple[str, str]] = Counter()

    def is_other(record: logging.LogRecord) -> bool:
        """Count vLLM's warnings, and keep them from the log."""
        if record.levelno != logging.WARNING or not str(record.msg).startswith(_WARNING):
            return True
        assert isinstance(record.args, tuple)
        _, stored, served = record.args
        tensors[str(stored), str(served)] += 1
        return False

    _LOADER.addFilter(is_other)
    try:
        yield
    finally:
        _LOADER.removeFilter(is_other)
    for (stored, served), number in tensors.items():
        logger.info(
            "%d tensors of the checkpoint are %s, and served in %s.", number, stored, served
        )
