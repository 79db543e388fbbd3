"""The option table is whole: every option of this vLLM is in it, and nothing else."""

from __future__ import annotations

import re
import typing
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from vllm_diffusion.startup.option_table import OptionRow, read_rows
from vllm_diffusion.startup.unsupported_options import CONDITIONS

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[3]
# The state of an option whose settings need no rows of their own.
WHOLE = ("refused", "unreached", "untried")


def options_of_vllm() -> dict[str, str]:
    """Every option of ``vllm serve`` by its first long name, with its attribute."""
    from tests.robustness.serve_options import serve_parser

    found = {}
    for action in serve_parser()._actions:
        names = [name for name in action.option_strings if name.startswith("--")]
        found[names[0] if names else action.dest] = action.dest
    return found


def settings_of(attribute: str) -> list[str]:
    """Names of an option's own settings; empty unless it takes a configuration as JSON."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    for owner in (VllmConfig, EngineArgs):
        kinds = [field.type for field in fields(owner) if field.name == attribute]
        for kind in kinds:
            for one in (kind, *typing.get_args(kind)):
                if is_dataclass(one):
                    return [field.name for field in fields(one) if field.init]
    return []


def test_every_option_has_one_row() -> None:
    """A new option of vLLM fails here until somebody decides, and one that is gone until it goes."""
    rows = {name: row for row in read_rows() for name in row.names}
    assert len(rows) == sum(len(row.names) for row in read_rows())
    expected = set()
    for name, attribute in options_of_vllm().items():
        expected.add(name)
        if name in rows and rows[name].state not in WHOLE:
            expected |= {f"{name}.{setting}" for setting in settings_of(attribute)}
    assert sorted(expected - set(rows)) == [], "options without a row"
    assert sorted(set(rows) - expected) == [], "rows without an option"


def test_settings_are_found() -> None:
    """The walk above sees the settings of a JSON option."""
    assert "backend" in settings_of("structured_outputs_config")
    assert "backend_per_kind" in settings_of("attention_config")
    assert settings_of("max_num_seqs") == []


def test_refusals_have_conditions() -> None:
    """What the table calls refused is refused somewhere, and nothing else is."""
    rows = [row for row in read_rows() if row.line]
    named = {name for row in rows if not row.where for name in row.names}
    assert set(CONDITIONS) <= named
    for row in rows:
        if row.where:
            assert list((ROOT / "vllm_diffusion").rglob(row.where))
        else:
            assert set(row.names) & set(CONDITIONS), f"{row.names[0]} has no condition"


@pytest.mark.parametrize(
    "row", [row for row in read_rows() if row.line], ids=lambda row: row.names[0]
)
def test_lines(row: OptionRow) -> None:
    """One sentence that names what was set, and is recognised with values in place."""
    assert "\n" not in row.line
    assert row.line.endswith(".")
    name = row.names[0].removeprefix("--").partition(".")[0]
    assert name in row.line or name.replace("-", "_") in row.line
    assert row.explains(row.line)
    assert row.explains(re.sub(r"\{\w+\}", "3 or 4", row.line))
    assert not row.explains("Before. " + row.line)
