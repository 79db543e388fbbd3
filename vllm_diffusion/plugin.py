"""The entry point that vLLM calls in every process before it looks at a model.

Nothing here raises and nothing heavy is imported: a failure would break every vLLM command, also
for models that are not ours. What does not fit is said when a diffusion checkpoint is configured.
"""

from __future__ import annotations

from vllm_diffusion.config import environment_flags

ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"
_MODEL_CLASS = "vllm_diffusion.models.diffusion_gemma:DiffusionGemmaForBlockDiffusion"


def register() -> None:
    """Register our model class, its start-up checks and its request validation.

    Safe to call twice.
    """
    if environment_flags().disabled:
        return
    try:
        from vllm.model_executor.models import ModelRegistry
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from vllm_diffusion import validation
        from vllm_diffusion.engine_config import DiffusionGemmaEngineConfig

        MODELS_CONFIG_MAP[ARCHITECTURE] = DiffusionGemmaEngineConfig
        ModelRegistry.register_model(ARCHITECTURE, _MODEL_CLASS)
        validation.install()
    except Exception:
        # Stock's class would now serve unnoticed, so this is said aloud.
        import logging

        logging.getLogger("vllm.vllm_diffusion").exception(
            "vllm-diffusion could not register itself; diffusion checkpoints will not be served "
            "by it. Run `vllm-diffusion doctor`."
        )
