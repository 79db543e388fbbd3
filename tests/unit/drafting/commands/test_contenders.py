"""Servers that ``vllm-diffusion bench-drafts`` compares, and how each is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import refusal_of
from vllm_diffusion.cli import values
from vllm_diffusion.cli.checkpoint import shipped_checkpoint, shipped_draft
from vllm_diffusion.drafting.commands import contenders
from vllm_diffusion.drafting.commands.draft_runs import Contender


def entrants(
    target: Path,
    drafts: dict[str, tuple[str, ...]],
    scratch: Path,
    *,
    is_tiny: bool,
    steps: list[int],
) -> tuple[list[Contender], dict[str, tuple[Any, Any]]]:
    """Return those of the default methods, and of each its speculative and additional configuration."""
    found = contenders.contenders(
        target,
        drafts,
        methods=contenders.default_methods(drafts, adds_models=is_tiny),
        steps=steps,
        num_drafts=3,
        scratch=scratch,
    )
    configured = {}
    for each in found:
        named = dict(zip(each.options[::2], map(json.loads, each.options[1::2]), strict=True))
        configured[each.name] = (
            named.get("--speculative-config"),
            named.get("--additional-config"),
        )
    return found, configured


def test_tiny_pair(tmp_path: Path) -> None:
    """Every method, DFlash with its block, EAGLE-3 with a draft that is made."""
    target, draft = shipped_checkpoint("qwen3"), str(shipped_draft("qwen3"))
    found, configured = entrants(target, {"dflash": (draft,)}, tmp_path, is_tiny=True, steps=[1, 2])
    dflash = {"method": "dflash", "model": draft, "num_speculative_tokens": 7}
    three = {"num_speculative_tokens": 3}
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    head = {"model": str(tmp_path / "eagle3"), "draft_load_config": {"load_format": "dummy"}}
    assert configured == {
        "no draft": (None, None),
        "dflash, 1 pass": (dflash, None),
        "dflash, 2 passes": (dflash, {"drafting": {"steps": 2}}),
        "adaptive": (dflash, {"drafting": {"adaptive": True}}),
        "ngram": ({"method": "ngram", **three, **lookup}, None),
        "draft_model": ({"method": "draft_model", "model": str(target), **three}, None),
        "eagle3": ({"method": "eagle3", **head, **three}, None),
    }
    notes = {each.name: each.note for each in found if each.note}
    assert notes.keys() == {"draft_model", "eagle3"}
    assert notes["eagle3"].startswith("untrained")


def test_given_drafts(tmp_path: Path) -> None:
    """Two DFlash drafts are told apart by their folders; others by their method, which is passed on."""
    for name, block in (("old", 8), ("new", 16), ("a=c", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"block_size": block}))
    read = values.named_model(contenders.draft_method)
    assert read(str(tmp_path / "a=c")) == ("", str(tmp_path / "a=c"))
    given = [str(tmp_path / "old"), str(tmp_path / "new"), "eagle3=a/b", "mtp=d"]
    drafts = contenders.drafts_by_method([read(each) for each in given])
    assert drafts["eagle3"] == ("a/b",)
    _, configured = entrants(Path("a/target"), drafts, tmp_path, is_tiny=False, steps=[1])
    assert {
        name: spec["num_speculative_tokens"] for name, (spec, _) in configured.items() if spec
    } == {
        "dflash old": 7,
        "dflash new": 15,
        "adaptive old": 7,
        "adaptive new": 15,
        "ngram": 3,
        "eagle3": 3,
        "mtp": 3,
    }


def test_draft_without_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before anything is started; a block among the fields of DFlash is one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    said = refusal_of(capsys, "bench-drafts", "a/model", "--data", "tiny-tasks", "--draft", ".")
    assert "block_size=None in its config.json" in said
    (tmp_path / "config.json").write_text('{"dflash_config": {"block_size": 6}}')
    assert contenders.block_size_of(".") == 6
