"""Files of a checkpoint: which of them are its weights, and small ones beside them."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_diffusion.weights.weight_files import ADAPTER, INDEX

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

logger = logging.getLogger("vllm.vllm_diffusion")


def choose_weight_files(vllm_config: VllmConfig) -> None:
    """Load the files that an index names, and warn of an adapter that is not loaded.

    vLLM would load consolidated files before them, which Mistral's releases have under other names of tensors.
    """
    load_config, folder = vllm_config.load_config, Path(vllm_config.model_config.model)
    if load_config.load_format == "auto" and (folder / INDEX).is_file():
        load_config.load_format = "hf"
    if (folder / ADAPTER).is_file() and vllm_config.lora_config is None:
        module = shlex.quote(f"NAME={folder}")
        logger.warning(
            "%s is an adapter, and the model is served without it; with --enable-lora --lora-modules %s "
            "requests for the model NAME are answered with it.",
            folder / ADAPTER,
            module,
        )


def checkpoint_file(model_config: ModelConfig, folder: str, name: str) -> Path | None:
    """Return the path of a file in a subfolder of the checkpoint, fetched if it is on the hub.

    Returns:
        ``None`` if the checkpoint has no such file.
    """
    from transformers.utils import cached_file

    found = cached_file(
        model_config.model,
        name,
        subfolder=folder,
        revision=model_config.revision,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return None if found is None else Path(found)
