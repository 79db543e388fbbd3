"""A server may set what a request may, and nothing that no request could."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.specs import SETTINGS, diffusion_gemma_spec
from vllm_diffusion.decoding.entropy_bound import EntropyBound
from vllm_diffusion.decoding.settings import MAX_STEPS
from vllm_diffusion.requests.params import PREFIX, RequestParamError, parse_canvas_params
from vllm_diffusion.startup.denoising_settings import Published, denoising_settings
from vllm_diffusion.startup.plugin_settings import PluginSettings


def parse(args: dict[str, Any]) -> Any:
    return parse_canvas_params(args, spec=diffusion_gemma_spec(4, 8), vocab_size=64)


def configure(section: dict[str, Any]) -> tuple[int, Any]:
    config = SimpleNamespace(additional_config={"diffusion": section}, diffusion_config=None)
    published = Published({"max_denoising_steps": 48, **SETTINGS, "t_min": 1e-4}, "a file")
    return denoising_settings(config, EntropyBound(), published)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EntropyBound.settings)
@pytest.mark.parametrize("value", [2**31, 1e39, 1e-46, -1, math.nan, math.inf, True, "1"])
def test_settings_of_a_server_have_the_same_bounds(name: str, value: Any) -> None:
    """Refused at start-up if and only if a request is refused for it, by the setting's name."""
    expected = None
    try:
        parse({PREFIX + name: value})
    except RequestParamError as error:
        expected = str(error).removeprefix(f"{PREFIX}{name} ").partition(";")[0]
    if expected is None:
        configure({name: value})
        return
    with pytest.raises(ValueError, match=f"{name}=.* must be") as refused:
        configure({name: value})
    assert expected in str(refused.value)


@pytest.mark.parametrize("steps", [0, MAX_STEPS.high + 1, 2**31, 8.0, True])
def test_step_cap_of_a_server(steps: Any) -> None:
    """A cap that no pass reaches is a request that never ends."""
    with pytest.raises(
        ValueError, match=r"max_denoising_steps=.* must be an integer of at least 1"
    ):
        PluginSettings(max_denoising_steps=steps)
