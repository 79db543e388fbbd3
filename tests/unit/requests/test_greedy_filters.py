"""Tests of the filters of requests at temperature 0."""

import copy
import pickle
from typing import Any

import pytest

from tests.support.engines.admission import checked
from tests.support.models.specs import masked_spec
from vllm_diffusion.decoding.canvas_spec import CanvasSpec
from vllm_diffusion.decoding.layouts import ShiftedSequence
from vllm_diffusion.decoding.timed_reveal import TimedReveal
from vllm_diffusion.requests import refusals
from vllm_diffusion.requests.arguments import RequestArguments, arguments_of
from vllm_diffusion.requests.greedy_filters import NOTED

pytestmark = pytest.mark.engine

DREAM = CanvasSpec.of(
    ShiftedSequence(32),
    TimedReveal(4),
    32,
    {"algorithm": "entropy", "eps": 1e-3, "alg_temp": 0.0},
    mask_token_id=4,
)


def params_of(**values: Any) -> Any:
    """Return vLLM's parameters, made as in a process that serves a diffusion model."""
    from vllm import SamplingParams

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
