"""Checkpoints whose ``model_type`` is a family's, and whose architecture is not.

vLLM ends with the list of every architecture that it knows, or with a bare ``NotImplementedError``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs


def unknown_architecture(
    arguments: EngineArgs, served: Mapping[str, tuple[str, ...]]
) -> str | None:
    """Return the message for a checkpoint that only seems to be of one of our families.

    Args:
        arguments: Arguments from which vLLM could not make a model's configuration.
        served: Architectures that are served, by ``model_type``.

    Returns:
        The message; ``None`` if the failure has another reason.
    """
    from transformers import PretrainedConfig
    from vllm.model_executor.models import ModelRegistry

    try:
        config, _ = PretrainedConfig.get_config_dict(arguments.model, revision=arguments.revision)
    except Exception:
        return None
    if isinstance(arguments.hf_overrides, dict):
        config = config | arguments.hf_overrides
    model_type, found = config.get("model_type"), config.get("architectures") or []
    known = ModelRegistry.get_supported_archs()
    if model_type not in served or any(architecture in known for architecture in found):
        return None
    says = (
        f"config.json of the checkpoint has model_type={model_type!r} with architectures={found!r}"
    )
    if not served[model_type]:
        return f"{says}, of which none is served; docs/use/families.md has what is."
    overrides = json.dumps({"architectures": served[model_type][:1]})
    return (
        f"{says}, and of that model_type {' and '.join(served[model_type])} alone is served. If layers, "
        f"weights and loop are the same, say so with --hf-overrides '{overrides}'; otherwise "
        "docs/develop/add-a-family.md says what it takes."
    )
