"""Tests of the ways that a server offers, and of the arguments that each way supports."""

import pickle
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.support.engines.admission import refused, validate
from tests.support.engines.vllm_configs import configure, vllm_config
from vllm_diffusion.checkpoints import shipped_checkpoint
from vllm_diffusion.requests.arguments import arguments_of
from vllm_diffusion.requests.refusals import CONSTRAINT, note_constraint

pytestmark = pytest.mark.engine

DRAFTS, CAUSAL, DENOISED = "linear_spec", "autoregressive", "entropy_bound"


def checked(way: str | None, server: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Return checked parameters of a request to a server that offers all ways."""
    settings = {"rules": [DENOISED, DRAFTS, CAUSAL]} if server is None else server
    own = {name: fields.pop(name) for name in list(fields) if name.startswith("diffusion_")}
    if way is not None:
        own["diffusion_rule"] = way
    sampling = SamplingParams(**fields, extra_args=own or None)
    config = vllm_config(additional_config={"diffusion": settings})
    validate(sampling, config)
    return sampling


@pytest.mark.parametrize(
    ("way", "width", "steps"),
    [(None, None, None), (DENOISED, None, None), (DRAFTS, 16, 1), (CAUSAL, 1, 1)],
)
def test_canvases_of_a_way(way: str | None, width: int | None, steps: int | None) -> None:
    """A draft has the server's width, and a canvas of the autoregressive way has one token."""
    arguments = arguments_of(checked(way, max_tokens=100))
    assert (arguments.canvas_length, arguments.max_steps) == (width, steps)


def test_parameters_of_a_way_that_are_used_again() -> None:
    """Checked parameters are accepted again with the width that was written into them."""
    for way in (DRAFTS, CAUSAL):
        sampling = checked(way, max_tokens=100)
        width = arguments_of(sampling).canvas_length
        again = checked(way, max_tokens=100, diffusion_canvas_length=width)
        assert arguments_of(again) == arguments_of(sampling)


def test_default_of_a_server() -> None:
    """A request that chooses no way has that of the setting ``rule``."""
    server = {"rules": [DENOISED, CAUSAL], "rule": CAUSAL}
    assert arguments_of(checked(None, server, max_tokens=9)).canvas_length == 1
    assert arguments_of(checked(DENOISED, server, max_tokens=90)).canvas_length is None


@pytest.mark.parametrize("way", [DRAFTS, CAUSAL])
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.2),
        ("bad_words", ["a"]),
        ("diffusion_max_steps", 4),
        ("diffusion_read_only", True),
        ("diffusion_preset", "fast"),
        ("diffusion_t_min", 0.0),
    ],
)
def test_what_a_way_cannot_honour(way: str, field: str, value: Any) -> None:
    """An argument is refused by name for a way without it, and accepted for denoising."""
    with refused(field, f'choose another diffusion_rule than "{way}"'):
        checked(way, **{field: value})
    checked(DENOISED, **{field: value})


@pytest.mark.parametrize(
    ("argument", "value", "field"),
    [
        ("diffusion_prediction", {"type": "content", "content": "a"}, "prediction"),
        ("diffusion_prediction", "a", "diffusion_prediction"),
        ("diffusion_suffix", "a", "suffix"),
    ],
)
def test_fields_of_texts(argument: str, value: Any, field: str) -> None:
    """A refusal names the field in which OpenAI's clients send a text."""
    with refused(field, f"^{field} needs a tokenizer"):
        checked(DRAFTS, max_tokens=4, **{argument: value})


@pytest.mark.parametrize("way", [DRAFTS, CAUSAL])
def test_structured_outputs_of_a_way(way: str) -> None:
    """A grammar is refused for a way that draws rows before the tokens in front are known, by the
    fields of OpenAI's API and without an object of Python's.
    """
    # Nobody has read a body here.
    note_constraint(CONSTRAINT)
    with refused("structured_outputs", r"\(response_format, tools\)") as raised:
        checked(way, structured_outputs=StructuredOutputsParams(regex="a+"))
    assert "StructuredOutputsParams" not in str(raised.value)


def test_steering_of_a_single_token() -> None:
    """Settings of drafts are accepted for drafts only, since single tokens are not denoised."""
    fields: dict[str, Any] = {"diffusion_frames": 1, "diffusion_stability_threshold": 0}
    checked(DRAFTS, **fields)
    for name, value in fields.items():
        with refused(name, "has no effect"):
            checked(CAUSAL, **{name: value})


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ({}, "diffusion_rule cannot be chosen on this server"),
        ({"rules": [DENOISED, DRAFTS]}, f"must be one of {DENOISED}, {DRAFTS}; got '{CAUSAL}'"),
        ({"rule": CAUSAL}, "diffusion_rule has no effect here"),
    ],
    ids=str,
)
def test_ways_that_a_server_does_not_offer(server: dict[str, Any], reason: str) -> None:
    """A way that the server does not offer is refused by name, with the offered ones."""
    with refused("diffusion_rule", reason):
        checked(CAUSAL, server)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"rules": [DENOISED, "reveal"]},
            "must list some of entropy_bound, linear_spec, autoregressive",
        ),
        ({"rules": [DENOISED, DENOISED]}, "each once"),
        ({"rules": DENOISED}, 'must be "all" or a list of names'),
        ({"rules": 5}, 'must be "all" or a list of names'),
        ({"rules": [DRAFTS, CAUSAL]}, "must include 'entropy_bound'"),
        ({"rules": [DENOISED, CAUSAL], "rule": DRAFTS}, "must include 'linear_spec'"),
    ],
    ids=str,
)
def test_rules_that_no_server_can_offer(settings: dict[str, Any], reason: str) -> None:
    """A start with an invalid choice of rules names the setting and its allowed values."""
    with pytest.raises(ValueError, match=reason):
        configure(shipped_checkpoint(), additional_config={"diffusion": settings})


@pytest.mark.parametrize("rules", ["all", [DENOISED, DRAFTS, CAUSAL]])
def test_all_ways_of_a_model(rules: Any) -> None:
    """``rules`` may list all ways of the model, whose own is the first; the engine and its workers,
    which are other processes, get them.
    """
    settings = {"rules": rules, "draft_length": 8}
    plan = vllm_config(additional_config={"diffusion": settings}).model_config.diffusion
    spec = pickle.loads(pickle.dumps(plan)).spec
    assert [way.name for way in spec.ways] == [DENOISED, DRAFTS, CAUSAL]
    assert [way.layout.length for way in spec.ways] == [32, 8, 8]
    assert [way.length for way in spec.ways] == [32, 8, 1]
