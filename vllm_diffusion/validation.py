"""Requests are refused at the door, in the API process, and nowhere else.

Replaces vLLM's validation of diffusion requests: what our sampler honours is accepted, and what
nothing honours yet is a 400 that names the field.
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm_diffusion.request_params import RequestParamError, parse_canvas_params

# Larger than any step cap: the worker lowers a request's cap to the server's.
_NO_CAP = 2**31 - 1


def install() -> None:
    """Put our checks in place of vLLM's, for diffusion models only. Safe to call twice."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import input_processor

    replacements: tuple[tuple[Any, str, Any], ...] = (
        (SamplingParams, "_validate_diffusion", validate_sampling_params),
        (input_processor, "validate_diffusion_sampling_params", validate_diffusion_arguments),
    )
    for owner, name, ours in replacements:
        stock = getattr(owner, name)
        if stock is not ours:
            # So that the check of vLLM's signatures still sees what was there.
            ours.__signature__ = inspect.signature(stock)
            setattr(owner, name, ours)


def validate_sampling_params(params: Any, model_config: Any) -> None:
    """Refuse sampling parameters that a canvas's sampler would ignore.

    Args:
        params: The request's ``SamplingParams``.
        model_config: vLLM's ``ModelConfig``.

    Raises:
        VLLMValidationError: Naming the field; the server answers 400.
    """
    if not model_config.is_diffusion:
        return
    from vllm.exceptions import VLLMValidationError

    unsupported = {
        "min_tokens": params.min_tokens > 0,
        "logit_bias": bool(params.logit_bias),
        "bad_words": bool(params.bad_words),
        "allowed_token_ids": bool(params.allowed_token_ids),
        "presence_penalty": params.presence_penalty != 0.0,
        "frequency_penalty": params.frequency_penalty != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        # The engine asserts that prompt log-probabilities come with a first token, which a canvas
        # yields passes later.
        "prompt_logprobs": params.prompt_logprobs is not None,
        "prompt_logprob_token_ids": params.prompt_logprob_token_ids is not None,
    }
    for field, is_set in unsupported.items():
        if is_set:
            raise VLLMValidationError(
                f"{field} is not supported for diffusion models yet; leave it out.",
                parameter=field,
                value=getattr(params, field),
            )


def validate_diffusion_arguments(
    params: Any, *, canvas_length: int | None, vocab_size: int
) -> None:
    """Check ``diffusion_*`` arguments and give a read-only request its limits.

    Args:
        params: The request's ``SamplingParams``; ``max_tokens`` and ``ignore_eos`` of a read-only
            request are set in place.
        canvas_length: The server's canvas width in tokens.
        vocab_size: Number of token ids.

    Raises:
        VLLMValidationError: Naming the field; the server answers 400.
    """
    from vllm.exceptions import VLLMValidationError

    assert canvas_length is not None
    try:
        canvas = parse_canvas_params(
            params.extra_args,
            canvas_length=canvas_length,
            vocab_size=vocab_size,
            max_denoising_steps=_NO_CAP,
            logprob_token_ids=params.logprob_token_ids,
        )
    except RequestParamError as error:
        raise VLLMValidationError(str(error), parameter=error.field) from None
    if canvas.read_only:
        # One canvas is the whole output, and an end token drawn into it does not end it early.
        width = canvas.canvas_length or canvas_length
        params.max_tokens = min(params.max_tokens or width, width)
        params.ignore_eos = True
