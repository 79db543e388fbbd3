"""Generation settings that come with a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_diffusion.weights.regular_files import json_object

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def generation_config(model_config: ModelConfig) -> tuple[Mapping[str, Any], str]:
    """Read the checkpoint's generation settings; return them and the name of their source."""
    folder = model_config.generation_config
    if folder in ("auto", "vllm"):
        folder = model_config.hf_config_path or model_config.model
    path = Path(folder) / "generation_config.json"
    if path.is_file():
        try:
            content = json_object(path)
        except ValueError as error:
            raise ValueError(f"{path} {error}; mend it, or copy the checkpoint again.") from None
        return content, str(path)
    # A checkpoint on the hub: vLLM knows how to find it.
    return model_config.try_get_generation_config(), f"generation_config.json of {folder}"
