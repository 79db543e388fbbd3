"""Configurations of vLLM, resolved as a server resolves them."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_diffusion.checkpoints import shipped_checkpoint

_resolved: dict[str, Any] = {}


def configure(checkpoint: Path, **arguments: Any) -> Any:
    """Return what ``vllm serve`` resolves before it loads anything."""
    from vllm.engine.arg_utils import EngineArgs

    defaults: dict[str, Any] = {"max_model_len": 256, "enforce_eager": True}
    return EngineArgs(model=str(checkpoint), **(defaults | arguments)).create_engine_config()


def vllm_config(checkpoint: Path | None = None, **arguments: Any) -> Any:
    """A configuration that a test may change: a copy of what is resolved once for equal arguments.

    Args:
        checkpoint: Folder of a checkpoint; the shipped tiny DiffusionGemma by default.
        arguments: Of vLLM's ``EngineArgs``.
    """
    folder = checkpoint or shipped_checkpoint()
    key = repr((folder, sorted(arguments.items())))
    if key not in _resolved:
        _resolved[key] = configure(folder, **arguments)
    return copy.deepcopy(_resolved[key])


def replan(config: Any, **changes: Any) -> None:
    """Change the plan that a configuration carries.

    Args:
        config: vLLM's ``VllmConfig`` of a diffusion model.
        changes: Fields of ``DiffusionPlan``.
    """
    config.model_config.diffusion = replace(config.model_config.diffusion, **changes)
