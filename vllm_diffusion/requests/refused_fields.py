"""A refusal says which field it is about where a client looks for it: in ``param`` of the error."""

from __future__ import annotations

from typing import Any

from vllm_diffusion.replacement import replace


def install() -> None:
    """Name the field of refusals in which vLLM only begins its sentence with it.

    vLLM checks sampling parameters where they are made, before it is known which model they are
    for. So this is put in place in a process that configures a diffusion model, and in no other.
    Safe to call twice.
    """
    from vllm.sampling_params import SamplingParams

    replace(SamplingParams, "_verify_args", _naming_fields)


def _naming_fields(stock_check: Any) -> Any:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    def verify_args(self: Any) -> None:
        """Stock's checks of each parameter by itself."""
        try:
            stock_check(self)
        except VLLMValidationError as error:
            message = str(error.args[0])
            field = message.partition(" ")[0]
            if error.parameter is not None or field not in SamplingParams.__struct_fields__:
                raise
            value = getattr(self, field)
            raise VLLMValidationError(message, parameter=field, value=value) from None

    return verify_args
