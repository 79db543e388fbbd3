"""The entry point that vLLM calls in every process before it looks at a model.

Nothing here raises and nothing heavy is imported: a failure would break every vLLM command, also
for models that are not ours. What does not fit is said when a diffusion checkpoint is configured.
"""

from __future__ import annotations

import logging

from vllm_diffusion.settings.plugin_settings import environment_flags
from vllm_diffusion.upstream import INSTALL

logger = logging.getLogger("vllm.vllm_diffusion")

ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"
_MODEL_CLASS = "vllm_diffusion.families.diffusion_gemma.model:DiffusionGemmaForBlockDiffusion"
# vLLM's own for every other model.
_TOOL_PARSER = "vllm_diffusion.requests.tool_calls.gemma_parser:GemmaToolParser"


_failure: Exception | None = None


def failure() -> Exception | None:
    """Why :func:`register` did not finish in this process; ``None`` if it did."""
    return _failure


def register() -> None:
    """Register our start-up checks, our model class, our request validation and our tool parser.

    Safe to call twice. What does not fit is kept for :func:`failure`, which the start-up checks
    ask when a diffusion checkpoint is configured.
    """
    global _failure
    if environment_flags().disabled:
        return
    _failure = None
    can_check = False
    try:
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from vllm_diffusion.startup import refusals
        from vllm_diffusion.startup.engine_config import DiffusionGemmaEngineConfig

        # First, so that every later failure is told by our checks.
        MODELS_CONFIG_MAP[ARCHITECTURE] = DiffusionGemmaEngineConfig
        can_check = True
        refusals.install()

        from vllm.model_executor.models import ModelRegistry
        from vllm.tool_parsers import ToolParserManager

        from vllm_diffusion.requests import validation
        from vllm_diffusion.startup import request_capacity

        ModelRegistry.register_model(ARCHITECTURE, _MODEL_CLASS)
        validation.install()
        ToolParserManager.register_lazy_module("gemma4", *_TOOL_PARSER.split(":"))
        request_capacity.install()
    except Exception as error:
        _failure = error
        # Where nothing can check, stock's class serves unnoticed unless this is said aloud.
        logger.log(
            logging.DEBUG if can_check else logging.ERROR,
            "vllm-diffusion could not register itself with this vLLM (%s: %s), so it serves no "
            "diffusion checkpoint here; run %s.",
            type(error).__name__,
            error,
            INSTALL,
        )
