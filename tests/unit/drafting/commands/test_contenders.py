"""Servers that ``vllm-diffusion bench-drafts`` compares: how each is started, why not, and their figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.cli.checkpoint import shipped_draft
from vllm_diffusion.drafting.commands import contenders, draft_table
from vllm_diffusion.drafting.commands.draft_runs import Round, refusal
from vllm_diffusion.drafting.commands.growth import Growth


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


def test_tiny_pair() -> None:
    """DFlash with its block and its passes, and what needs no draft."""
    draft = str(shipped_draft("qwen3"))
    dflash = {"method": "dflash", "model": draft, "num_speculative_tokens": 7}
    three = {"num_speculative_tokens": 3}
    lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    methods = [*contenders.TINY_METHODS, "ngram"]
    assert configured([("dflash", draft)], methods, [1, 2]) == {
        "no draft": (None, None),
        "dflash, 1 pass": (dflash, None),
        "dflash, 2 passes": (dflash, {"drafting": {"steps": 2}}),
        "adaptive": (dflash, {"drafting": {"adaptive": True}}),
        "ngram": ({"method": "ngram", **three, **lookup}, None),
    }


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


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("INFO x\n(A pid=1) a.b.SomeError: one\nValueError: two\n", "a.b.SomeError: one"),
        ("ValueError: one\nvllm-diffusion: not that.\n", "vllm-diffusion: not that."),
        ("INFO ValueError: quoted\n", ""),
        (
            "usage: vllm serve\nvllm_command.py serve: error: unrecognized arguments: --x\n",
            "vllm_command.py serve: error: unrecognized arguments: --x",
        ),
        (
            "(A pid=1) a.ValidationError: 1 validation error for Config\nmethod\n  No such one\nat x\n",
            "a.ValidationError: 1 validation error for Config method No such one",
        ),
    ],
)
def test_refusal(log: str, reason: str) -> None:
    """Ours over others', the first of those; nothing of a log without one."""
    assert refusal(log) == reason


def rounds_of(speeds: list[float]) -> list[Round]:
    return [
        Round("a", 1, index, 1 / speed, 2 / speed, Growth(1, 1, 0.1), ((1, 2),))
        for index, speed in enumerate(speeds, start=1)
    ]


@given(st.lists(st.floats(0.5, 500), min_size=1, max_size=5), st.floats(0.1, 10))
def test_ratio(speeds: list[float], times: float) -> None:
    """Whatever a machine does from round to round, as long as it does it to all."""
    slow, fast = rounds_of(speeds), rounds_of([speed * times for speed in speeds])
    assert draft_table.rates(slow) == pytest.approx(speeds)
    assert draft_table.ratios(fast, slow) == pytest.approx([times] * len(speeds))
    assert draft_table.processor_ratios(fast, slow) == pytest.approx([times] * len(speeds))
    idle = [replace(each, processor_seconds=0.0) for each in slow]
    assert draft_table.processor_ratios(fast, idle) == []
