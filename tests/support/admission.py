"""vLLM's checks of a request in the process that has the client, without a renderer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def validate(params: Any, vllm_config: Any) -> None:
    """Check sampling parameters as vLLM's input processor does for a model without a tokenizer.

    Raises:
        ValueError: If the request is refused.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    processor: Any = SimpleNamespace(
        vllm_config=vllm_config,
        model_config=vllm_config.model_config,
        diffusion_config=None,
        scheduler_config=vllm_config.scheduler_config,
        speculative_config=None,
        structured_outputs_config=vllm_config.structured_outputs_config,
        tokenizer=None,
        validate_logits_processors_params=lambda params: None,
        resolve_watermarking=lambda params: False,
    )
    InputProcessor._validate_params(processor, params, ("generate",))
