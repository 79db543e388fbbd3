"""What ``vllm.LLM`` is asked for without a server's protocol in between."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("bias", [float("nan"), float("inf")])
def test_bias_that_is_no_number(bias: float) -> None:
    """Refused by its name, where no protocol clamps it."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vllm_diffusion.validation import validate_sampling_params

    params = SamplingParams(logit_bias={5: bias})
    with pytest.raises(VLLMValidationError, match="logit_bias must hold finite numbers"):
        validate_sampling_params(params, SimpleNamespace(is_diffusion=True))
