"""Servers that ``vllm-diffusion bench-drafts`` compares: how each is started, why not, and their figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_diffusion.drafting.commands import contenders


def configured(
    given: list[tuple[str, str]], methods: list[str], steps: list[int]
) -> dict[str, tuple[Any, Any]]:
    """Return the speculative and the additional configuration of each contender."""
    configurations = {}
    for each in contenders.contenders(given, methods=methods, steps=steps, num_drafts=3):
        named = dict(zip(each.options[::2], map(json.loads, each.options[1::2]), strict=True))
        configurations[each.name] = (
            named.get("--speculative-config"),
            named.get("--additional-config"),
        )
    return configurations


def test_given_drafts(tmp_path: Path) -> None:
    """Two DFlash drafts are told apart by their folders; others by their method, which is passed on."""
    for name, block in (("old", 8), ("new", 16), ("a=c", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"block_size": block}))
    read = contenders.named_draft
    assert read(str(tmp_path / "a=c")) == ("", str(tmp_path / "a=c"))
    given = [str(tmp_path / "old"), str(tmp_path / "new"), "eagle3=a/b", "mtp=d"]
    found = configured([read(each) for each in given], [], [1])
    assert {name: spec["num_speculative_tokens"] for name, (spec, _) in found.items() if spec} == {
        "dflash old": 7,
        "dflash new": 15,
        "eagle3": 3,
        "mtp": 3,
        "adaptive old": 7,
        "adaptive new": 15,
        "ngram": 3,
    }
