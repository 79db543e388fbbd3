"""The table of compiled kernels: what follows from a compiler's report, and that it is up to date."""

from __future__ import annotations

import dataclasses

import compiled
import pytest
import records
import torch

from tests.support.triton_compile import SHARED_MEMORY

REPORT = {"kernel": "k", "num_warps": 8, "registers": 61, "spilled_bytes": 0, "shared_memory": 32}


@pytest.mark.parametrize(
    ("changes", "programs"),
    [
        # 64 registers of 256 threads: a quarter of them.
        ({}, 4),
        ({"registers": 65}, 3),
        ({"registers": 32}, 8),
        ({"num_warps": 4, "registers": 255}, 2),
        # The system keeps a kilobyte for each.
        ({"shared_memory": 113 * 1024}, 2),
        ({"shared_memory": 114 * 1024}, 1),
    ],
)
def test_programs_of_a_multiprocessor(changes, programs):
    """By registers, threads and shared memory of an H100."""
    row = compiled.row("sm_90", "statistics", "ours", REPORT | changes, 8.0, None)
    assert row.programs == programs
    assert row.issue_cycles == 2.0


def test_a_row_above_stock_names_what_decides():
    ours = compiled.row("sm_90", "statistics", "ours", REPORT, 8.0, None)
    stock = dataclasses.replace(ours, whose="stock", instructions=7.9)
    assert compiled.decided_by(ours, [ours, stock]) == "`sampler`"
    assert compiled.decided_by(stock, [ours, stock]) == ""
    more = dataclasses.replace(stock, instructions=8.1)
    other = dataclasses.replace(stock, whose="FlashAttention-4")
    assert compiled.decided_by(ours, [ours, more]) == ""
    assert compiled.decided_by(ours, [ours, more, other]) == "`sampler`"
    same = dataclasses.replace(stock, instructions=8.0)
    assert compiled.decided_by(ours, [ours, same]) == ""
    split = dataclasses.replace(ours, what="attention, full, split", instructions=None)
    assert compiled.decided_by(split, [split]) == ""


def test_the_launcher_knows_how_many_programs_run_at_once():
    """What splits are counted by is what the table says of the kernels."""
    from attention_kernels.canvas_attention.triton.configs import tuned_config

    programs = {
        (row["chip"], row["kernel of"]): int(row["programs a multiprocessor"])
        for row in records.read_table("compiled")
        if row["whose"] == "ours"
    }
    for chip in compiled.CHIPS:
        for what, head_dim in (("attention, sliding", 256), ("attention, full", 512)):
            config = tuned_config(
                head_dim, torch.bfloat16, torch.bfloat16, compiled.capability(chip)
            )
            assert config.programs == programs[chip, what], (chip, what)


def test_the_table_is_whole():
    """Every chip, layer and side; and what decides a row is an experiment of the campaign."""
    from experiments import EXPERIMENTS

    assert set(compiled.CHIPS) <= set(SHARED_MEMORY)
    assert set(compiled.DECIDES.values()) <= {experiment.name for experiment in EXPERIMENTS}
    rows = records.read_table("compiled")
    assert {(row["chip"], row["kernel of"], row["whose"]) for row in rows} == {
        (chip, what, whose)
        for chip in compiled.CHIPS
        for what in compiled.DECIDES
        for whose in ("ours", "stock")
    } | {
        (chip, f"attention, {layer}, split", "ours")
        for chip in compiled.CHIPS
        for layer in ("sliding", "full")
    } | {("sm_90", f"attention, {layer}", "FlashAttention-4") for layer in ("sliding", "full")}


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("chip", compiled.CHIPS)
def test_the_table_is_up_to_date(chip):
    """gpu-figures.md has what this compiler makes of these kernels."""
    _, _, *lines = compiled.table(compiled.compiled(chip)).splitlines()
    text = records.DOCUMENT.read_text(encoding="utf-8")
    assert all(line in text for line in lines), "run python benchmarks/gpu/compiled.py --write"
