"""Every option of this vLLM has a decision, and every refused one a sentence."""

import re
import typing
from dataclasses import fields, is_dataclass

import pytest

from tests.robustness.serve_options import OPTIONS, explains
from vllm_diffusion.startup import options
from vllm_diffusion.startup.options import sentences

pytestmark = pytest.mark.engine

# Refused by modules with more to do than that.
ELSEWHERE = {"--attention-backend"}


def options_of_vllm() -> dict[str, str]:
    """Return every option of ``vllm serve`` by its first long name, with its attribute."""
    from tests.robustness.serve_options import serve_parser

    found = {}
    for action in serve_parser()._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        found[names[0] if names else action.dest] = action.dest
    return found


def settings_of(attribute: str) -> list[str]:
    """Return the names of an option's settings, if it accepts a configuration as JSON."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    for owner in (VllmConfig, EngineArgs):
        kinds = [field.type for field in fields(owner) if field.name == attribute]
        for kind in kinds:
            for one in (kind, *typing.get_args(kind)):
                if is_dataclass(one):
                    return [field.name for field in fields(one) if field.init]
    return []


def test_every_option_is_known() -> None:
    """Every option of vLLM is listed, and no other.

    Of a listed JSON option every setting is listed.
    """
    known = {*OPTIONS.known, *sentences()}
    assert not set(OPTIONS.known) & set(sentences())
    expected = set()
    for name, attribute in options_of_vllm().items():
        expected.add(name)
        if any(each.startswith(f"{name}.") for each in known):
            expected |= {f"{name}.{setting}" for setting in settings_of(attribute)}
    assert sorted(expected - known) == [], "options that nobody decided about"
    assert sorted(known - expected) == [], "options that vLLM has not"


def test_settings_are_found() -> None:
    """The settings of a JSON option are found."""
    assert "backend" in settings_of("structured_outputs_config")
    assert "backend_per_kind" in settings_of("attention_config")
    assert settings_of("max_num_seqs") == []


def test_refusals_have_conditions() -> None:
    """Exactly the options with a sentence have a condition that refuses them."""
    in_code = [*options.EARLY_CONDITIONS, *options.CONDITIONS, *ELSEWHERE]
    conditions = [*options.checked_fields(), *in_code]
    assert sorted(conditions) == sorted(sentences())
    # The shipped checkpoint has experts.
    assert set(sentences()) - set(OPTIONS.refused) == {"--enable-expert-parallel"}


@pytest.mark.parametrize("name", sentences())
def test_sentences(name: str) -> None:
    """Each refusal is one sentence that names the option, and is recognized with its values."""
    line = sentences()[name]
    assert "\n" not in line
    assert line.endswith(".")
    stem = name.removeprefix("--").partition(".")[0]
    assert stem in line or stem.replace("-", "_") in line
    assert explains(line, line)
    assert explains(line, re.sub(r"\{[\w.]+\}", "3 or 4", line))
    assert not explains(line, "Before. " + line)
