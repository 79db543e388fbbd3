"""Figures of servers that are compared, and the reason of one that did not start."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_diffusion.drafting.commands import draft_runs, draft_table, processes
from vllm_diffusion.drafting.commands.draft_runs import Contender, Growth, Result, Round, refusal
from vllm_diffusion.drafting.commands.draft_table import as_json, tables
from vllm_diffusion.drafting.commands.prompt_sets import Prompt


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
    before = processes.processor_seconds([ours])
    while processes.processor_seconds([ours, gone]) < before + 0.05:
        sum(range(10_000))
    assert processes.processor_seconds([gone]) == 0
    block = bytearray(64 * 2**20)
    assert processes.peak_resident_bytes(ours) > len(block)
    assert processes.peak_resident_bytes(gone) == 0

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
    monkeypatch.setattr(processes, "working_accelerator", lambda: "cuda")
    assert processes.device_bytes([10, 11, 12]) == 11
    assert processes.device_bytes([10]) is None
    used[1] = [(12, None)]
    assert processes.device_bytes([11, 12]) is None
    del nvml.nvmlInit
    assert processes.device_bytes([11]) is None
    monkeypatch.setattr(processes, "working_accelerator", lambda: None)
    assert processes.device_bytes([11]) == 0


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
