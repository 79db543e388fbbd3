"""Description of a served model for the page: its settings, their bounds and defaults."""

from __future__ import annotations

from typing import Any

from vllm_diffusion.requests.arguments import PREFIX, offered_settings
from vllm_diffusion.requests.params import end_token_ids


def describe(model_config: Any, end_tokens: list[str]) -> dict[str, Any]:
    """Describe a served model for ``GET /v1/diffusion/model``.

    Args:
        model_config: vLLM's ``ModelConfig``.
        end_tokens: Result of :func:`end_tokens_of`.

    Returns:
        JSON: the ``model``'s served name, its ``architecture``, ``canvas_length`` and
        ``max_model_len`` in tokens, its ``end_tokens``; ``settings``, what a request may set in
        ``vllm_xargs``, as :func:`offered_settings` describes it; and ``presets``: settings that go
        together, by the preset's name.

    Raises:
        ValueError: If this package does not serve the model.
    """
    spec = getattr(model_config, "canvas_spec", None)
    if spec is None:
        raise ValueError(
            f"{model_config.served_model_name} is not served by vllm-diffusion, so it has no canvas; "
            "see `vllm-diffusion doctor`."
        )
    return {
        "model": model_config.served_model_name,
        "architecture": model_config.architecture,
        "canvas_length": spec.length,
        "max_model_len": model_config.max_model_len,
        "end_tokens": end_tokens,
        "settings": offered_settings(spec),
        "presets": {
            name: {PREFIX + setting: value for setting, value in values.items()}
            for name, values in spec.rule.presets.items()
        },
    }


def end_tokens_of(model_config: Any, tokenizer: Any) -> list[str]:
    """Spell the tokens that end an answer where its request names no others, as frames spell them.

    Args:
        model_config: vLLM's ``ModelConfig``.
        tokenizer: The served model's; ``None`` where vLLM was started without one.
    """
    from vllm import SamplingParams
    from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens

    if tokenizer is None:
        return []
    params = SamplingParams()
    params.update_from_generation_config(
        model_config.try_get_generation_config(), tokenizer.eos_token_id
    )
    return list(convert_ids_list_to_tokens(tokenizer, end_token_ids(params)))
