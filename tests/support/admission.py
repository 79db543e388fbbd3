"""vLLM's checks of a request in the process that has the client, without a renderer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def validate(
    params: Any,
    model_config: Any,
    structured_outputs_config: Any = None,
    *,
    max_num_seqs: int = 8,
) -> None:
    """Check sampling parameters as vLLM's input processor does for a model without a tokenizer.

    Args:
        params: ``SamplingParams`` of a request.
        model_config: vLLM's ``ModelConfig``, or what has its attributes.
        structured_outputs_config: vLLM's; without it constraints are not checked.
        max_num_seqs: Requests that the server runs at the same time.

    Raises:
        ValueError: If the request is refused.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    processor: Any = SimpleNamespace(
        model_config=model_config,
        diffusion_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=max_num_seqs),
        speculative_config=None,
        structured_outputs_config=structured_outputs_config,
        tokenizer=None,
        vllm_config=SimpleNamespace(use_v2_model_runner=True),
        validate_logits_processors_params=lambda params: None,
        resolve_watermarking=lambda params: False,
    )
    InputProcessor._validate_params(processor, params, ("generate",))
