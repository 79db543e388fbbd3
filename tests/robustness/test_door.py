"""Hypothesis searches for an accepted number that the device's tensors cannot hold."""

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.robustness.requests import NUMBERS, NUMERIC_XARGS
from tests.support.models.specs import diffusion_gemma_spec
from vllm_diffusion.requests.arguments import parse_arguments

pytestmark = pytest.mark.engine

SPEC = diffusion_gemma_spec(32)
numbers = st.one_of(st.sampled_from(NUMBERS), st.floats(), st.integers(), st.integers(0, 60))


def assert_held(given_value: float, held: float) -> None:
    """Check that ``held`` is ``given_value`` in float32, where a temperature may become 0."""
    assert math.isfinite(held)
    rounded = torch.tensor(given_value, dtype=torch.float32).item()
    assert held == pytest.approx(rounded, rel=1e-6, abs=0), (given_value, held)


@given(st.dictionaries(st.sampled_from(NUMERIC_XARGS), numbers, max_size=4))
@example({"diffusion_stability_threshold": 2**31})
@example({"diffusion_t_max": 1e39})
@example({"diffusion_t_min": 1e-46, "diffusion_t_max": 1.0})
@settings(max_examples=400, deadline=None)
def test_numbers_of_a_request(arguments: dict[str, Any]) -> None:
    """Every number that is accepted arrives in the slots as it was sent."""
    from vllm.exceptions import VLLMValidationError

    from vllm_diffusion.canvas.slots import CanvasSlots, NewRequest

    refused = None
    try:
        params = parse_arguments(arguments, spec=SPEC, vocab_size=316, logprob_token_ids=[5])
    except VLLMValidationError as error:
        refused = error.parameter
    if refused is not None:
        assert refused in arguments
        return
    slots = CanvasSlots(2, SPEC, 316, torch.device("cpu"))
    slots.add_request(1, NewRequest(params))
    slots.apply_staged_writes()
    for name, value in params.settings.items():
        assert_held(float(value), slots.requested.settings[name][1].item())
    assert 1 <= slots.requested.max_steps[1] <= 48
