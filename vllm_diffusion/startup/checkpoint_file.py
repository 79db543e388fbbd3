"""Small files next to a checkpoint's weights, local or in a repository of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def checkpoint_file(model_config: ModelConfig, folder: str, name: str) -> Path | None:
    """Return the path of a file in a subfolder of the checkpoint, fetched if it is on the hub.

    Returns:
        ``None`` if the checkpoint has no such file.
    """
    from transformers.utils import cached_file

    cached = cached_file(
        model_config.model,
        name,
        subfolder=folder,
        revision=model_config.revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if cached is None else Path(cached)
