"""What vLLM refuses where sampling parameters are made says which field it is about."""

from __future__ import annotations

import math
from typing import Any

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this test only, as in a process that configures a diffusion model."""
    from vllm import SamplingParams

    from vllm_diffusion.requests import refusals

    monkeypatch.setattr(SamplingParams, "_verify_args", SamplingParams._verify_args)
    refusals.install()
    once = SamplingParams._verify_args
    refusals.install()
    assert SamplingParams._verify_args is once


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("min_p", math.inf),
        ("min_p", math.nan),
        ("presence_penalty", 3.0),
        ("frequency_penalty", math.nan),
        ("repetition_penalty", 0.0),
        ("top_k", -5),
        ("min_tokens", -1),
        # vLLM names these itself.
        ("temperature", math.inf),
        ("top_p", 2.0),
        ("max_tokens", 0),
    ],
)
def test_field(field: str, value: Any) -> None:
    """In ``parameter``, of which a server makes ``param``."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError) as raised:
        SamplingParams(**{field: value})
    assert raised.value.parameter == field
    assert str(raised.value).startswith(field)
