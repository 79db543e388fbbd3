"""vLLM and the family accept each line of the list of published checkpoints, and a start compares
their published sampling with what it serves.
"""

import shlex
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from tests.support.families.cases import checkpoint_of
from tests.support.families.makers import a2d_qwen2
from vllm_diffusion.cli.main import main
from vllm_diffusion.families.registry import FAMILIES
from vllm_diffusion.startup.masked_models import MaskedEngineConfig
from vllm_diffusion.startup.plan import spec_of
from vllm_diffusion.startup.published_checkpoints import CheckpointFamily, checkpoint_families
from vllm_diffusion.startup.published_runs import (
    NEUTRAL,
    published_loop,
    published_runs,
    sampling_changes,
)

pytestmark = pytest.mark.engine

LISTED = checkpoint_families()
# Tiny checkpoints by the list's names of their families.
TINY = {
    "DiffusionGemmaForBlockDiffusion": "diffusion-gemma",
    "SDARForCausalLM": "sdar",
    "SDARMoeForCausalLM": "sdar-moe",
    "LLaDA2MoeModelLM": "llada2.0",
    "LLaDAModelLM": "llada",
    "LLaDAMoEModelLM": "llada-moe",
    "ILLaDAForCausalLM": "illada",
    "DreamModel": "dream",
    "CoDALanguageModel": "coda",
    "RND1LM": "rnd1",
    "DreamForCausalLM": "dream-reasoner",
    "NemotronLabsDiffusionModel": "nemotron",
    "Fast_dLLM_QwenForCausalLM": "fast-dllm",
    "StableDiffcoderForCausalLM": "stable-diffcoder",
    "A2DQwen3LMHeadModel": "a2d",
    # Files of an MDLM are those of a BD3LM.
    "A2DQwen3MDLM": "a2d",
    "MinerUDiffusionForConditionalGeneration": "mineru",
    "UnoK2HorizonForCausalLM": "uno_k2",
}

# What a trainer writes, and nobody has published.
UNPUBLISHED = {"A2DLlamaLMHeadModel", "A2DLlamaMDLM", "Fast_dLLM_Qwen3ForCausalLM"}


def parsed(command: str) -> Any:
    """Return what vLLM's parser makes of a line that begins with ``vllm serve``."""
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(shlex.split(command)[2:])
    arguments.model = arguments.model_tag
    validate_parsed_serve_args(arguments)
    return arguments


def test_every_family_and_id_is_listed_once() -> None:
    """Each architecture has checkpoints, whose ids are unique."""
    served = {one.beside_adapter or one.architecture for one in FAMILIES}
    assert {family.architecture for family in LISTED} == served - UNPUBLISHED
    rows = [row for family in LISTED for row in family.checkpoint]
    ids = [row.id for row in rows]
    assert len(set(ids)) == len(ids)


def test_every_line_is_one_that_vllm_takes() -> None:
    """vLLM's parser accepts each line, and knows the parsers that it names."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for family in LISTED:
        for row in family.checkpoint:
            arguments = parsed(family.command(row))
            assert arguments.model == (row.base or row.id)
            assert arguments.tensor_parallel_size == row.num_gpus
            if arguments.tool_call_parser:
                ToolParserManager.get_tool_parser(arguments.tool_call_parser)
            if arguments.reasoning_parser:
                ReasoningParserManager.get_reasoning_parser(arguments.reasoning_parser)


@pytest.mark.parametrize("family", LISTED, ids=lambda family: family.name)
def test_its_family_takes_the_line(
    family: CheckpointFamily, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line's options give a tiny checkpoint of that name a plan of its family."""
    from vllm.engine.arg_utils import EngineArgs

    # The tiny ones have fewer positions than the published.
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    row = family.checkpoint[0]
    folder = tmp_path / row.id.split("/")[1]
    if family.architecture in TINY:
        checkpoint_of(TINY[family.architecture], folder)
    else:
        a2d_qwen2().save(folder)
    # An adapter of its own lies in the tiny checkpoint's folder.
    adapter = folder / "adapter" if row.base else folder
    command = family.command(row).replace(row.id, str(adapter))
    arguments = parsed(command.replace(row.base or row.id, str(folder)))
    config = EngineArgs.from_cli_args(arguments).create_engine_config()
    assert config.model_config.architecture == family.architecture
    assert spec_of(config.model_config) is not None


def test_models_prints_lines_to_copy(capsys: pytest.CaptureFixture[str]) -> None:
    """The command lists the lines whose family or id has all words, or reports that none has."""
    assert main(["models", "SDAR", "4b"]) == 0
    out = capsys.readouterr().out
    assert "\n  vllm serve JetLM/SDAR-4B-Chat --tool-call-parser hermes" in out
    assert "SDAR-8B" not in out
    assert main(["models"]) == 0
    out = capsys.readouterr().out
    assert all(row.id in out for family in LISTED for row in family.checkpoint)
    assert main(["models", "gpt"]) == 1
    assert "No checkpoint has gpt in its name" in capsys.readouterr().err


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
