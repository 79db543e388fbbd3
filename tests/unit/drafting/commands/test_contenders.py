"""Servers that ``vllm-diffusion bench-drafts`` compares: how each is started, why not, and their figures."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.commands import refusal_of
from vllm_diffusion.cli import values
from vllm_diffusion.cli.checkpoint import shipped_checkpoint, shipped_draft
from vllm_diffusion.drafting.commands import contenders, draft_runs, draft_table
from vllm_diffusion.drafting.commands.draft_runs import Contender, Result, Round, refusal
from vllm_diffusion.drafting.commands.draft_table import as_json, tables
from vllm_diffusion.drafting.commands.growth import Growth
from vllm_diffusion.drafting.commands.prompt_sets import Prompt


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


def test_costs_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processor time grows with work; memory is the most that a process had, on GPUs where that is known."""
    ours, gone = os.getpid(), 2**22 + 1
    before = draft_runs.processor_seconds([ours])
    while draft_runs.processor_seconds([ours, gone]) < before + 0.05:
        sum(range(10_000))
    assert draft_runs.processor_seconds([gone]) == 0
    block = bytearray(64 * 2**20)
    assert draft_runs.peak_resident_bytes(ours) > len(block)
    assert draft_runs.peak_resident_bytes(gone) == 0

    used = {0: [(11, 5), (99, 70)], 1: [(12, 6)]}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetComputeRunningProcesses=lambda device: [
            SimpleNamespace(pid=pid, usedGpuMemory=count) for pid, count in used[device]
        ],
    )
    utils = SimpleNamespace(import_pynvml=lambda: nvml)
    monkeypatch.setitem(sys.modules, "vllm.utils.import_utils", utils)
    monkeypatch.setattr(draft_runs, "working_accelerator", lambda: "cuda")
    assert draft_runs.device_bytes([10, 11, 12]) == 11
    assert draft_runs.device_bytes([10]) is None
    used[1] = [(12, None)]
    assert draft_runs.device_bytes([11, 12]) is None
    del nvml.nvmlInit
    assert draft_runs.device_bytes([11]) is None
    monkeypatch.setattr(draft_runs, "working_accelerator", lambda: None)
    assert draft_runs.device_bytes([11]) == 0


def rounds_of(speeds: list[float]) -> list[Round]:
    return [
        Round("a", 1, index, 1 / speed, 2 / speed, Growth(1, 1, 0.1), ((1, 2),))
        for index, speed in enumerate(speeds, start=1)
    ]


@given(st.lists(st.floats(0.5, 500), min_size=1, max_size=5), st.floats(0.1, 10))
def test_ratio(speeds: list[float], times: float) -> None:
    """Whatever a machine does from round to round, as long as it does it to all."""
    slow, fast = rounds_of(speeds), rounds_of([speed * times for speed in speeds])
    assert draft_table.tokens_per_second(slow) == pytest.approx(speeds)
    assert draft_table.ratios(fast, slow) == pytest.approx([times] * len(speeds))
    assert draft_table.processor_ratios(fast, slow) == pytest.approx([times] * len(speeds))
    idle = [replace(each, processor_seconds=0.0) for each in slow]
    assert draft_table.processor_ratios(fast, idle) == []


@pytest.mark.parametrize(("one", "several"), [(2.0, 1.5), (2.0, 3.0), (0.5, 0.4)])
def test_verdict(one: float, several: float) -> None:
    """The fastest, whether any pays, and whether passes do."""
    results = [
        Result(Contender("no draft"), rounds_of([10, 10])),
        Result(Contender("dflash, 1 pass", passes=1), rounds_of([10 * one, 10 * one])),
        Result(Contender("dflash, 2 passes", passes=2), rounds_of([10 * several, 10 * several])),
    ]
    plan = draft_runs.Plan((Prompt("a", text="x"),), (1,), 2, 8, 0.0)
    said = tables(as_json(results, plan))
    best = "dflash, 1 pass" if one > several else "dflash, 2 passes"
    pays = "the fastest is" if max(one, several) > 1 else "no draft pays; the fastest is"
    assert f"1 at a time: {pays} {best}, with {max(one, several):.2f} times" in said
    does = "pay" if several > one else "do not pay"
    assert f"1 at a time: 2 passes {does}: {several / one:.2f} times" in said
