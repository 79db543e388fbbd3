"""A start compares the published sampling with what it serves, by data whose names exist."""

from pkgutil import resolve_name

import pytest

from vllm_diffusion.families.registry import FAMILIES
from vllm_diffusion.startup.masked_models import MaskedEngineConfig
from vllm_diffusion.startup.published_runs import (
    NEUTRAL,
    published_loop,
    published_runs,
    sampling_changes,
)

pytestmark = pytest.mark.engine

MASKED = [
    (family.architecture, rule)
    for family in FAMILIES
    for rule in resolve_name(family.engine_config).rules
    if issubclass(resolve_name(family.engine_config), MaskedEngineConfig)
]


@pytest.mark.parametrize(("architecture", "rule"), MASKED)
def test_every_rule_has_its_loop(architecture: str, rule: str) -> None:
    """A published loop's settings are settings of its rule, with values that the rule allows."""
    run = published_loop(architecture, rule)
    assert run is not None
    known = {family.architecture: resolve_name(family.engine_config) for family in FAMILIES}
    settings = known[architecture].rules[rule].rule(0).settings
    assert all(settings[name].allows(value) for name, value in run.settings.items())


def test_sources() -> None:
    """Each published run has its source, and names parameters of vLLM's."""
    for run in published_runs():
        assert run.source
        assert run.kind in ("function", "example", "evaluation", "checkpoint")
        assert run.sampling.keys() <= NEUTRAL.keys()


@pytest.mark.parametrize(
    ("served", "wanted", "changes"),
    [
        ({}, {"temperature": 1.0, "top_k": 0}, {}),
        ({"temperature": 0.0, "top_k": 5}, {"temperature": 0.0}, {}),
        ({}, {"temperature": 0.0}, {"temperature": (1.0, 0.0)}),
        (
            {"temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.05},
            {"temperature": 0.0},
            {"temperature": (0.7, 0.0), "repetition_penalty": (1.05, 1.0)},
        ),
        (
            {"temperature": 0.6, "top_k": 20},
            {"temperature": 1.0},
            {"temperature": (0.6, 1.0), "top_k": (20, 0)},
        ),
    ],
    ids=str,
)
def test_sampling_changes(served: dict, wanted: dict, changes: dict) -> None:
    """At temperature 0 a filter is not a difference in sampling, and a penalty is."""
    assert sampling_changes(served, wanted) == changes


def test_sampling_changes_of_a_rule_that_judges_by_filters() -> None:
    """A filter at temperature 0 is a difference if the rule judges by it."""
    changes = sampling_changes({"temperature": 0.0, "top_p": 0.9}, {"temperature": 0.0}, True)
    assert changes == {"top_p": (0.9, 1.0)}
