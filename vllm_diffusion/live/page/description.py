"""Description of a served model for the page: its settings, their bounds and defaults."""

from __future__ import annotations

from typing import Any

from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.settings import Choice, Setting
from vllm_diffusion.requests.arguments import PREFIX
from vllm_diffusion.requests.params import end_token_ids


def describe(model_config: Any, end_tokens: list[str]) -> dict[str, Any]:
    """Describe a served model for ``GET /v1/diffusion/model``.

    Args:
        model_config: vLLM's ``ModelConfig``.
        end_tokens: Result of :func:`end_tokens_of`.

    Returns:
        JSON: the ``model``'s served name, its ``architecture``, ``canvas_length`` and
        ``max_model_len`` in tokens, its ``end_tokens``; ``settings``, what a request may set in
        ``vllm_xargs``, each with its ``name``, ``meaning``, ``default`` and either the ``words`` to
        choose from or ``is_integer``, ``low`` and ``high``; and ``presets``: settings that go
        together, by the preset's name.

    Raises:
        ValueError: If this package does not serve the model.
    """
    spec: CanvasSpec | None = getattr(model_config, "canvas_spec", None)
    if spec is None:
        raise ValueError(
            f"{model_config.served_model_name} is not served by vllm-diffusion, so it has no canvas; "
            "see `vllm-diffusion doctor`."
        )
    settings: dict[str, tuple[Setting | Choice, float | str | None]] = {}
    if spec.rule.presets:
        words = tuple(spec.rule.presets)
        settings["preset"] = Choice(words, "settings of the rule that go together"), None
    steps = Setting(int, 1, spec.max_denoising_steps, "the step cap of a canvas")
    settings["max_steps"] = steps, spec.max_denoising_steps
    if spec.layout.allows_width(1):
        width = Setting(int, 1, spec.length, "positions of a canvas")
        settings["canvas_length"] = width, spec.length
    settings |= {
        name: (setting, spec.settings[name]) for name, setting in spec.rule.settings.items()
    }
    return {
        "model": model_config.served_model_name,
        "architecture": model_config.architecture,
        "canvas_length": spec.length,
        "max_model_len": model_config.max_model_len,
        "end_tokens": end_tokens,
        "settings": [_setting(name, *settings[name]) for name in settings],
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


def _setting(name: str, setting: Setting | Choice, default: float | str | None) -> dict[str, Any]:
    told = {"name": PREFIX + name, "meaning": setting.meaning, "default": default}
    if isinstance(setting, Choice):
        return told | {"words": setting.words}
    bounds = {"low": setting.low, "high": setting.high}
    return told | {"is_integer": setting.kind is int} | bounds
