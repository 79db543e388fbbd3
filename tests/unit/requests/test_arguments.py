"""Tests of the bounds of a request's own arguments, of their way to the other processes, and of the
filters that they carry at temperature 0.
"""

import copy
import math
import pickle
import re
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from tests.support.engines.admission import checked, refused
from tests.support.models.specs import SETTINGS, diffusion_gemma_spec, masked_spec
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.entropy_bound import EntropyBound
from vllm_diffusion.decoding.layouts import ShiftedSequence
from vllm_diffusion.decoding.rule import MAX_STEPS
from vllm_diffusion.decoding.timed_reveal import TimedReveal
from vllm_diffusion.requests import refusals
from vllm_diffusion.requests.arguments import (
    PREFIX,
    RequestArguments,
    Shown,
    arguments_of,
    attach_arguments,
    parse_arguments,
)
from vllm_diffusion.requests.greedy_filters import NOTED
from vllm_diffusion.startup.denoising_settings import Published, denoising_settings
from vllm_diffusion.startup.plugin_settings import PluginSettings, plugin_settings

pytestmark = pytest.mark.engine


def parse(args: dict[str, Any]) -> Any:
    return parse_arguments(args, spec=diffusion_gemma_spec(4, 8), vocab_size=64)


def configure(section: dict[str, Any]) -> tuple[int, Any]:
    published = Published({"max_denoising_steps": 48, **SETTINGS, "t_min": 1e-4}, "a file")
    return denoising_settings(
        plugin_settings({"diffusion": section}), None, EntropyBound(), published
    )


@pytest.mark.parametrize("name", EntropyBound.settings)
@pytest.mark.parametrize("value", [2**31, 1e39, 1e-46, -1, math.nan, math.inf, True, "1"])
def test_settings_of_a_server_have_the_same_bounds(name: str, value: Any) -> None:
    """A start refuses a setting by name exactly where a request is refused for that value."""
    expected = None
    try:
        parse({PREFIX + name: value})
    except VLLMValidationError as error:
        expected = str(error).removeprefix(f"{PREFIX}{name} ").partition(";")[0]
    if expected is None:
        configure({name: value})
        return
    with pytest.raises(ValueError, match=f"{name}=.* must be") as refused:
        configure({name: value})
    assert expected in str(refused.value)


@pytest.mark.parametrize("steps", [0, MAX_STEPS.high + 1, 2**31, 8.0, True])
def test_step_cap_of_a_server(steps: Any) -> None:
    """A start refuses a step cap that no pass reaches, since requests would never end."""
    with pytest.raises(
        ValueError, match=r"max_denoising_steps=.* must be an integer of at least 1"
    ):
        PluginSettings(max_denoising_steps=steps)


ARGUMENTS = RequestArguments(
    max_steps=3,
    canvas_length=4,
    seed_canvas=(1, 2, 3, 4),
    pinned=(0, 3),
    read_only=True,
    allowed_ids=(5, 6),
    shown=Shown(2, ("kept",), step_map=True, trace=True),
    settings={"entropy_bound": 0.5, "stability_threshold": 2, "strategy": "dynamic"},
)


@pytest.mark.parametrize("arguments", [ARGUMENTS, RequestArguments()], ids=["all", "none"])
def test_way_to_the_engine(arguments: RequestArguments) -> None:
    """Arguments arrive unchanged in another process, which decodes them once."""
    params = SamplingParams(extra_args={"other": 1})
    attach_arguments(params, arguments)
    assert arguments_of(params) == arguments
    arrived = MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params))
    assert arguments_of(arrived) == arguments
    assert arguments_of(arrived) is arguments_of(arrived)
    assert arrived.extra_args["other"] == 1


def test_requests_without_arguments() -> None:
    """vLLM's own warm-up requests have no arguments."""
    for params in (None, SimpleNamespace(extra_args=None), SimpleNamespace(extra_args={"a": 1})):
        assert arguments_of(params) == RequestArguments()


@pytest.mark.parametrize("sent", [{"read_only": True}, {"max_steps": "x"}, "text", 5], ids=str)
def test_what_a_client_sends_in_their_place(sent: Any) -> None:
    """The engine reads the checked arguments, and nothing that a client puts in their place."""
    params = SamplingParams(max_tokens=64, extra_args={"vllm_diffusion": sent})
    checked(params, diffusion_gemma_spec(32))
    assert arguments_of(params) == RequestArguments()


def test_parameters_that_are_used_again() -> None:
    """``vllm.LLM`` accepts parameters again that the caller has changed in between."""
    spec = diffusion_gemma_spec(32)
    params = SamplingParams(max_tokens=64, extra_args={"diffusion_max_steps": 3})
    for _ in range(2):
        checked(params, spec)
        assert arguments_of(params) == RequestArguments(max_steps=3)
    params.extra_args["diffusion_max_steps"] = 100
    checked(params, spec)
    assert arguments_of(params).max_steps == spec.max_denoising_steps
    del params.extra_args["diffusion_max_steps"]
    checked(params, spec)
    assert arguments_of(params) == RequestArguments()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("steps", 32, "steps is called diffusion_max_steps here"),
        ("diffusion_steps", 32, "diffusion_steps is called diffusion_max_steps here"),
        ("gen_length", 128, "gen_length is called max_tokens here"),
        ("remasking", "low_confidence", "remasking is called diffusion_strategy here"),
        ("cfg_scale", 1.5, "cfg_scale is not served: guidance"),
        ("diffusion_cfg_scale", 1.5, "diffusion_cfg_scale is not served: guidance"),
        ("dual_cache", 1, "dual_cache is not served: an approximate cache"),
        ("diffusion_mc_num", 128, "diffusion_mc_num is not served: a likelihood"),
    ],
)
def test_names_of_published_loops(name: str, value: Any, reason: str) -> None:
    """An argument of a published loop that is not supported is refused, not ignored."""
    with refused(name, re.escape(reason)):
        parse_arguments({name: value}, spec=masked_spec(4), vocab_size=64)


@pytest.mark.parametrize(
    "sent",
    [{"cfg_scale": 0.0}, {"use_cache": 0}, {"alg": "entropy"}, {"top_n_sigma": 1.0}],
    ids=str,
)
def test_names_that_ask_for_nothing(sent: Any) -> None:
    """Arguments that are off, or for which the model has no setting, are accepted."""
    assert parse_arguments(sent, spec=masked_spec(4), vocab_size=64) == RequestArguments()


DREAM = CanvasSpec.of(
    ShiftedSequence(32),
    TimedReveal(4),
    32,
    {"algorithm": "entropy", "eps": 1e-3, "alg_temp": 0.0},
    mask_token_id=4,
)


def params_of(**values: Any) -> Any:
    """Return vLLM's parameters, made as in a process that serves a diffusion model."""
    refusals.install()
    return SamplingParams(**({"max_tokens": 8} | values))


def judging(params: Any, spec: CanvasSpec = DREAM) -> tuple[int, float]:
    """Return the filters that judge a checked request's tokens at temperature 0."""
    checked(params, spec)
    arguments = arguments_of(params)
    return arguments.judging_top_k, arguments.judging_top_p


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"temperature": 0.0}, (0, 1.0)),
        ({"temperature": 0.0, "top_p": 0.9}, (0, 0.9)),
        ({"temperature": 0.0, "top_k": 3}, (3, 1.0)),
        ({"temperature": 0.0, "top_k": -1, "top_p": 0.5}, (0, 0.5)),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.9}, (0, 1.0)),
    ],
    ids=str,
)
def test_filters_at_temperature_0_are_kept(
    values: dict[str, Any], expected: tuple[int, float]
) -> None:
    """A rule that judges by filters gets them at temperature 0, also from copied parameters."""
    params = params_of(**values)
    for one in (copy.deepcopy(params), pickle.loads(pickle.dumps(params)), params):
        assert judging(one) == expected
        # An offline batch of several prompts has one object checked for each.
        assert judging(one) == expected
        if expected != (0, 1.0):
            assert (one.top_k, one.top_p) == (0, 1.0)


def test_other_rules_have_no_filters_at_temperature_0() -> None:
    """Other families drop filters at temperature 0, so that no row is projected again."""
    params = params_of(temperature=0.0, top_k=3, top_p=0.9)
    assert judging(params, masked_spec(32)) == (0, 1.0)
    assert arguments_of(params) == RequestArguments()


@pytest.mark.parametrize(
    "noted", ["x", [3], [True, 0.9], [3, 0.0], [3, float("nan")], [0.5, 0.9], {"a": 1}], ids=str
)
def test_a_malformed_note_is_no_filter(noted: object) -> None:
    """A client's value under the note's name is ignored unless it has the form of a note."""
    params = params_of(temperature=0.0)
    params.extra_args = {NOTED: noted}
    assert judging(params) == (0, 1.0)
