"""What the door lets through, the device holds: Hypothesis looks for a number that it does not."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.robustness.requests import NUMBERS, NUMERIC_XARGS
from tests.support.specs import SETTINGS, diffusion_gemma_spec
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.entropy_bound import EntropyBound
from vllm_diffusion.decoding.layouts import FreeCanvas
from vllm_diffusion.requests.arguments import parse_arguments
from vllm_diffusion.startup.denoising_settings import Published, denoising_settings
from vllm_diffusion.startup.plugin_settings import plugin_settings

pytestmark = pytest.mark.engine

SPEC = diffusion_gemma_spec(32)
IN_SLOTS = tuple(EntropyBound.settings)
numbers = st.one_of(st.sampled_from(NUMBERS), st.floats(), st.integers(), st.integers(0, 60))


def assert_held(given_value: float, held: float) -> None:
    """``held``, on the device, is ``given_value`` but for float32's rounding."""
    assert math.isfinite(held)
    assert held == pytest.approx(given_value, rel=1e-6, abs=0), (given_value, held)


@given(st.dictionaries(st.sampled_from(NUMERIC_XARGS), numbers, max_size=4))
@example({"diffusion_stability_threshold": 2**31})
@example({"diffusion_t_max": 1e39})
@example({"diffusion_t_min": 1e-46, "diffusion_t_max": 1.0})
@settings(max_examples=400, deadline=None)
def test_numbers_of_a_request(arguments: dict[str, Any]) -> None:
    """What is not refused by its name arrives in the slots as it was sent."""
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


@given(st.dictionaries(st.sampled_from(("max_denoising_steps", *IN_SLOTS)), numbers, max_size=3))
@example({"stability_threshold": 2**31})
@example({"t_max": 1e39})
@settings(max_examples=400, deadline=None)
def test_numbers_of_a_server(options: dict[str, Any]) -> None:
    """What ``--additional-config`` may say, the device holds."""
    from vllm_diffusion.canvas.slots import CanvasSlots, NewRequest
    from vllm_diffusion.requests.arguments import RequestArguments

    # As it arrives.
    options = json.loads(json.dumps(options))
    published = Published({"max_denoising_steps": 48, **SETTINGS}, "generation_config.json")
    rule = EntropyBound()
    refused = None
    try:
        max_steps, values = denoising_settings(
            plugin_settings({"diffusion": options}), None, rule, published
        )
    except ValueError as error:
        refused = str(error)
    if refused is not None:
        assert any(name in refused for name in options)
        return
    spec = CanvasSpec(FreeCanvas(32), rule, max_steps, values)
    slots = CanvasSlots(2, spec, 316, torch.device("cpu"))
    slots.add_request(1, NewRequest(RequestArguments()))
    slots.apply_staged_writes()
    for name, value in options.items():
        held = (
            slots.requested.max_steps
            if name == "max_denoising_steps"
            else slots.requested.settings[name]
        )
        assert_held(float(value), held[1].item())
