"""What the door lets through, the device holds: Hypothesis looks for a number that it does not."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.robustness.requests import NUMBERS, NUMERIC_XARGS
from vllm_diffusion.requests.params import RequestParamError, parse_canvas_params
from vllm_diffusion.settings.plugin_settings import PluginSettings

pytestmark = pytest.mark.engine

LIMITS = {"canvas_length": 32, "vocab_size": 316, "max_denoising_steps": 48}
IN_SLOTS = ("entropy_bound", "confidence_threshold", "stability_threshold", "t_min", "t_max")
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
    from vllm_diffusion.canvas.slots import CanvasSlots, DenoisingDefaults

    refused = None
    try:
        params = parse_canvas_params(arguments, **LIMITS, logprob_token_ids=[5])
    except RequestParamError as error:
        refused = error.field
    if refused is not None:
        assert refused in arguments
        return
    slots = CanvasSlots(2, 32, DenoisingDefaults(48, 0.4, 0.8, 0.1, 0.005, 1), torch.device("cpu"))
    slots.add_request(1, params, 0)
    slots.apply_staged_writes()
    for name in IN_SLOTS:
        if (value := getattr(params, name)) is not None:
            assert_held(value, getattr(slots, name)[1].item())
    assert 1 <= slots.max_steps[1] <= 48


@given(st.dictionaries(st.sampled_from(("max_denoising_steps", *IN_SLOTS)), numbers, max_size=3))
@example({"stability_threshold": 2**31})
@example({"t_max": 1e39})
@settings(max_examples=400, deadline=None)
def test_numbers_of_a_server(options: dict[str, Any]) -> None:
    """What ``--additional-config`` may say, the device holds."""
    holders: dict[type, Callable[[Any], float]] = {
        int: lambda value: float(torch.tensor(value, dtype=torch.int32).item()),
        float: lambda value: float(torch.tensor(value, dtype=torch.float32).item()),
    }
    # As it arrives.
    options = json.loads(json.dumps(options))
    refused = None
    try:
        chosen = PluginSettings(**options)
    except ValueError as error:
        refused = str(error)
    if refused is not None:
        assert any(name in refused for name in options)
        return
    for name, value in options.items():
        kind = int if name in ("max_denoising_steps", "stability_threshold") else float
        assert_held(value, holders[kind](getattr(chosen, name)))


def test_rounding_is_that_of_float32() -> None:
    """The tolerance above is wider than a rounding, and narrower than a number that got lost."""
    one_third = struct.unpack("f", struct.pack("f", 1 / 3))[0]
    assert_held(1 / 3, one_third)
    with pytest.raises(AssertionError):
        assert_held(1e-45, struct.unpack("f", struct.pack("f", 1e-45))[0])
