"""Numbers that pass the door are numbers on the device, and the same ones."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_diffusion.canvas.slots import CanvasSlots, DenoisingDefaults
from vllm_diffusion.canvas.step import schedule_temperature
from vllm_diffusion.decoding.settings import MAX_STEPS, QUALITY
from vllm_diffusion.requests.params import PREFIX, RequestParamError, parse_canvas_params
from vllm_diffusion.settings.plugin_settings import PluginSettings, plugin_settings

DEFAULTS = DenoisingDefaults(8, 0.4, 0.8, 0.1, 0.005, 1)
NUMBERS = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([2**31, 2**31 - 1, -(2**31), 2**63, 10**400, 1e39, 1e-39, 1e-46, 5e-324, True]),
)


def parse(args: dict[str, Any]) -> Any:
    return parse_canvas_params(args, canvas_length=4, vocab_size=64, max_denoising_steps=8)


@given(
    st.dictionaries(
        st.sampled_from([PREFIX + name for name in (*QUALITY, "max_steps", "canvas_length")]),
        NUMBERS,
    )
)
@settings(deadline=None, max_examples=300)
def test_accepted_numbers_fit_the_device(args: dict[str, Any]) -> None:
    """What is not refused by its name is written to the slots, within float32's rounding."""
    refused = None
    try:
        params = parse(args)
    except RequestParamError as error:
        refused = error.field
    if refused is not None:
        assert refused in args
        return
    slots = CanvasSlots(2, 4, DEFAULTS, torch.device("cpu"))
    slots.add_request(1, params, 0)
    slots.apply_staged_writes()
    for name in QUALITY:
        value = args.get(PREFIX + name)
        stored = getattr(slots, name)[1].item()
        expected = getattr(DEFAULTS, name) if value is None else value
        assert stored != 0 or expected == 0
        assert math.isclose(stored, expected, rel_tol=1e-6)
    temperature = schedule_temperature(slots)[1]
    assert torch.isfinite(torch.tensor([-100.0, 100.0]) / temperature).all()


@pytest.mark.parametrize("name", QUALITY)
@pytest.mark.parametrize("value", [2**31, 1e39, 1e-46, -1, math.nan, math.inf, True, "1"])
def test_settings_of_a_server_have_the_same_bounds(name: str, value: Any) -> None:
    """Refused at start-up if and only if a request is refused for it, by the setting's name."""
    config = SimpleNamespace(additional_config={"diffusion": {name: value}})
    expected = None
    try:
        parse({PREFIX + name: value})
    except RequestParamError as error:
        expected = str(error).removeprefix(PREFIX)
    if expected is None:
        plugin_settings(config)  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match=f"{name} must be") as refused:
        plugin_settings(config)  # type: ignore[arg-type]
    assert expected in str(refused.value)


@pytest.mark.parametrize("steps", [0, MAX_STEPS.high + 1, 2**31, 8.0, True])
def test_step_cap_of_a_server(steps: Any) -> None:
    """A cap that no pass reaches is a request that never ends."""
    with pytest.raises(ValueError, match=r"max_denoising_steps must be an integer of at least 1"):
        PluginSettings(max_denoising_steps=steps)
