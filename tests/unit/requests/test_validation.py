"""What ``vllm.LLM`` is asked for without a server's protocol in between."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.checkpoints import SHIPPED
from tests.support.specs import diffusion_gemma_spec

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


@pytest.mark.parametrize("field", ["kv_transfer_params", "ec_transfer_params"])
@pytest.mark.parametrize("value", ["text", 5, ["a"], "x" * 10**6])
def test_transfer_params_that_are_no_mapping(field: str, value: Any) -> None:
    """vLLM asks them for their keys, wherever they come from."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    from vllm_diffusion.requests.validation import validate_sampling_params

    model_config = SimpleNamespace(
        is_diffusion=True, canvas_spec=diffusion_gemma_spec(32), get_vocab_size=lambda: 316
    )
    with pytest.raises(VLLMValidationError, match=f"{field} must be a mapping") as raised:
        validate_sampling_params(SamplingParams(extra_args={field: value}), model_config)
    assert raised.value.parameter == field
    assert len(str(raised.value)) < 200
    validate_sampling_params(SamplingParams(extra_args={field: {"a": 1}}), model_config)


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
