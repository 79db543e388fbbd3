"""Generation settings that come with a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{path} is not valid JSON ({error}); mend it, or copy the checkpoint again."
            ) from None
        if not isinstance(content, dict):
            raise ValueError(
                f"{path} must hold a JSON object of generation settings; copy the checkpoint again."
            )
        return content, str(path)
    # A checkpoint on the hub: vLLM knows how to find it.
    return model_config.try_get_generation_config(), f"generation_config.json of {folder}"
