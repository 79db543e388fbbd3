"""A check that the engine's process can decode what it is sent of a request.

The engine validates sampling parameters again when it decodes them, in the thread that receives all
requests. What is wrong there has no client any more who could be answered, and ends the engine. vLLM
validates before our own checks lower ``max_tokens``, and never checks the types of what Python sets.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from vllm_diffusion.requests.refusal import refuse

if TYPE_CHECKING:
    from vllm import SamplingParams

# How msgspec ends the description of an error: "... - at `$.max_tokens`", "... - at `key` in `$.logit_bias`".
_FIELD = re.compile(r"`\$\.(\w+)")


def check_decodable(params: SamplingParams) -> None:
    """Encode sampling parameters for the engine and decode them as the engine will.

    Args:
        params: Parameters of the request. An encoding that fails is left to vLLM, which answers the
            client: it fails in this process.

    Raises:
        VLLMValidationError: Naming the field that the engine would refuse.
    """
    import msgspec
    from vllm import SamplingParams
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    try:
        message = MsgpackEncoder().encode(params)
    except (TypeError, ValueError, OverflowError):
        return
    try:
        MsgpackDecoder(SamplingParams).decode(message)
    except msgspec.ValidationError as error:
        found = _FIELD.search(str(error))
        field = found.group(1) if found else "sampling_params"
        value = getattr(params, field, None)
        refuse(field, f"cannot be read by the engine: {error}.", value)
