"""What ``vllm.LLM`` is asked for without a server's protocol in between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.checkpoints import SHIPPED

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("bias", [float("nan"), float("inf")])
def test_bias_that_is_no_number(bias: float) -> None:
    """Refused by its name, where no protocol clamps it."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vllm_diffusion.requests.validation import validate_sampling_params

    params = SamplingParams(logit_bias={5: bias})
    with pytest.raises(VLLMValidationError, match="logit_bias of token 5 must be between"):
        validate_sampling_params(params, SimpleNamespace(is_diffusion=True))


@pytest.mark.parametrize("back_end", ["guidance", "outlines"])
def test_tools_with_a_back_end_that_knows_no_tags(back_end: str) -> None:
    """Refused with the back end that they need."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    from vllm_diffusion import plugin

    plugin.register()
    tag = '{"type": "structural_tag", "format": {"type": "token", "token": 12}}'
    params: Any = SamplingParams(structured_outputs=StructuredOutputsParams(structural_tag=tag))
    with pytest.raises(VLLMValidationError, match="back end xgrammar"):
        params._validate_structured_outputs(
            SimpleNamespace(is_diffusion=True),
            SimpleNamespace(backend=back_end),
            AutoTokenizer.from_pretrained(SHIPPED),
        )
