"""A refusal says which field it is about where a client looks for it: in ``param`` of the error."""

from __future__ import annotations

import traceback
from typing import Any

from vllm_diffusion.hooks.replacement import replaces_call

# Of vLLM's protocols: it takes ``structured_outputs`` for a mapping before anything has checked it.
_COUNTS_CONSTRAINTS = (
    "vllm.entrypoints.openai.completion.protocol:CompletionRequest.check_structured_outputs_count"
)


def install() -> None:
    """Name the field of refusals in which vLLM only begins its sentence with it.

    vLLM checks sampling parameters where they are made, before it is known which model they are
    for. So this is put in place in a process that configures a diffusion model, and in no other.
    Safe to call twice.
    """
    _naming_fields.install()
    _refusing_what_is_no_mapping.install()


@replaces_call(
    "vllm.entrypoints.serve.exception_handling.handlers.exception:create_error_response",
    reason="structured_outputs that is no mapping is a 400, where the protocol's check makes it a 500.",
    until="CompletionRequest.check_structured_outputs_count refuses what is no mapping.",
)
def _refusing_what_is_no_mapping(stock: Any, error: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer an exception as vLLM does; with a 400 where ``structured_outputs`` is asked for its keys."""
    from vllm.exceptions import VLLMValidationError

    if isinstance(error, AttributeError) and _is_raised_in(
        error, _COUNTS_CONSTRAINTS.rpartition(".")[2]
    ):
        error = VLLMValidationError(
            'structured_outputs must be an object, such as {"regex": "[a-z]+"}.',
            parameter="structured_outputs",
        )
    return stock(error, *args, **kwargs)


def _is_raised_in(error: BaseException, function: str) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(frame.f_code.co_name == function for frame in frames)


@replaces_call(
    "vllm.sampling_params:SamplingParams._verify_args",
    reason="Names the field of a refusal that names it in words only.",
    until="SamplingParams raises its refusals with their parameter.",
)
def _naming_fields(stock_check: Any, self: Any) -> None:
    """Check each parameter by itself, as vLLM does."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    try:
        stock_check(self)
    except VLLMValidationError as error:
        message = str(error.args[0])
        field = message.partition(" ")[0]
        if error.parameter is not None or field not in SamplingParams.__struct_fields__:
            raise
        value = getattr(self, field)
        raise VLLMValidationError(message, parameter=field, value=value) from None
