"""Refusal of a checkpoint that does not fit in this machine's memory, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig

# Bytes beyond the weights, for Python, torch and the engine's processes.
RESERVED_BYTES = 1024**3


def checkpoint_bytes(model: str) -> int:
    """Return the bytes of a local checkpoint's safetensors files; 0 if it is not local yet."""
    directory = Path(model)
    if not directory.is_dir():
        return 0
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def check_checkpoint_fits(model_config: ModelConfig) -> None:
    """Compare the checkpoint's size with the memory available now.

    Raises:
        ValueError: If the weights need more bytes than are available.
    """
    import psutil

    available = psutil.virtual_memory().available
    needed = checkpoint_bytes(model_config.model)
    if needed + RESERVED_BYTES > available:
        raise ValueError(
            f"The checkpoint {model_config.model} holds {needed / 2**30:.1f} GiB of weights, but "
            f"only {available / 2**30:.1f} GiB of memory are available. Free memory, or serve it "
            "on a machine with a GPU."
        )
