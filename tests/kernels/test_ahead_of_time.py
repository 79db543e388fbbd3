"""Every Triton kernel compiles for every chip without a GPU, and only attention's ever spill.

Triton compiles for a chip that is not there only in a process without its interpreter, so each chip
is checked by running this file. By hand it prints what the compiler reports; of attention with the
instructions of the innermost loops, of which the one over keys multiplies most:

    python tests/kernels/test_ahead_of_time.py sm_90
    PYTHONPATH=. python tests/kernels/test_ahead_of_time.py sm_90 statistics
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import pytest
import torch

from tests.support.counters import baselines
from tests.support.counters.triton_compile import (
    COMPILED,
    SHARED_MEMORY,
    compile_for,
    empty,
    recorded,
    run_uninterpreted,
    variant,
)


@dataclass(frozen=True)
class Case:
    """One way to call the kernel, with the shapes that decide how it is compiled."""

    head_dim: int
    query_dtype: str = "bfloat16"
    cache_dtype: str = "bfloat16"
    num_kv_heads: int = 2  # of 16 query heads
    block_size: int = 16
    max_seq_len: int = 131072
    window_left: int = -1
    window_anchor: str = "canvas"
    softcap: float = 0.0
    spans: bool = False
    num_splits: int = 4


# The layers of DiffusionGemma-26B: sliding (16:8 x 256, window 1024) and full (16:2 x 512).
MODEL_CASES = [Case(256, num_kv_heads=8, window_left=1023), Case(512)]
ALL_CASES = [
    *MODEL_CASES,
    *[Case(head_dim) for head_dim in (64, 128, 256)],
    *[Case(d, "float16", "float16") for d in (64, 128, 256, 512)],
    *[Case(d, "bfloat16", "float8_e4m3fn") for d in (64, 128, 256, 512)],
    *[Case(d, "float32", "float32") for d in (64, 128, 256, 512)],
    *[Case(d, block_size=64) for d in (256, 512)],
    *[replace(case, num_splits=1) for case in MODEL_CASES],
    *[Case(d, spans=True) for d in (256, 512)],
    *[Case(d, softcap=50.0) for d in (256, 512)],
    *[Case(d, window_left=1023, window_anchor="query") for d in (256, 512)],
]


def attention_launches(case: Case, capability: tuple[int, int]) -> list[tuple]:
    """Return the kernels that a call launches, with their arguments, on tensors without memory."""
    from attention_kernels.canvas_attention import AttentionOptions, PagedCache, Sequences, Window
    from attention_kernels.canvas_attention.triton import launch as kernels
    from attention_kernels.canvas_attention.triton.configs import tuned_config

    num_seqs, canvas, num_heads = 4, 256, 16
    query_dtype, cache_dtype = getattr(torch, case.query_dtype), getattr(torch, case.cache_dtype)
    query = empty(num_seqs * canvas, num_heads, case.head_dim, dtype=query_dtype)
    # Heads, then positions, then keys next to values: the layout of vLLM's cache.
    cache = empty(64, case.num_kv_heads, case.block_size, 2 * case.head_dim, dtype=cache_dtype)
    cache = cache.transpose(1, 2)
    scale = empty(dtype=torch.float32) if case.cache_dtype != case.query_dtype else None
    right = case.window_left if case.window_anchor == "query" else -1
    paged = PagedCache(cache[..., : case.head_dim], cache[..., case.head_dim :], scale, scale)
    sequences = Sequences(
        empty(num_seqs, case.max_seq_len // case.block_size),
        empty(num_seqs + 1),
        empty(num_seqs),
        empty(num_seqs),
        empty(num_seqs * canvas, 2) if case.spans else None,
        canvas,
        case.max_seq_len,
    )
    window = Window(case.window_left, right, case.window_anchor)
    options = AttentionOptions(0.0625, case.softcap, window)
    config = tuned_config(case.head_dim, query_dtype, cache_dtype, capability)
    cut = kernels.Cut(config, case.num_splits)
    with recorded() as launches:
        kernels.CanvasLaunch(query, paged, sequences, options, cut)(
            query, paged, torch.empty_like(query)
        )
    return launches


# What people serve on; the others are slow tests.
CHIPS = [
    pytest.param(chip, marks=() if chip == "sm_90" else pytest.mark.slow) for chip in SHARED_MEMORY
]
# Bytes a thread, by chip and head size. Sliding layers on SM100 take 68 instructions a key with 128
# rows a tile, what they spill outside the loop among them, and 108 with 64, which spill nothing; on
# SM80 it is variants for images that spill, and smaller tiles take half as many again.
SPILLS = {("sm_80", 256): 40, ("sm_80", 512): 40, ("sm_100", 256): 64}


def reports(chip: str, task: str, given: str = "") -> list[dict]:
    """Return what a process of its own reports of each kernel, within the chip's limits."""
    pytest.importorskip("triton")
    lines = run_uninterpreted(__file__, chip, task, given)
    for line in lines:
        assert line["spilled_bytes"] <= SPILLS.get((chip, line.get("head_dim")), 0), line
        assert line["shared_memory"] <= SHARED_MEMORY[chip], line
    return lines


def check(chip: str, cases: list[Case]) -> list[dict]:
    lines = reports(chip, "attention", json.dumps([asdict(case) for case in cases]))
    assert len(lines) >= len(cases)
    return lines


def check_baselines(kind: str, chip: str, lines: list[dict]) -> None:
    import triton

    found = {line["case"]: {name: line[name] for name in COMPILED} for line in lines}
    baselines.check(f"{kind}, {chip}, Triton {triton.__version__}", found)


@pytest.mark.parametrize("chip", CHIPS)
def test_ahead_of_time(chip):
    """The model's layers compile for a chip within its registers, shared memory and baselines."""
    lines = check(chip, MODEL_CASES)
    check_baselines("attention", chip, lines)
    for line in lines:
        if line["kernel"] == "canvas_attention_kernel":
            assert programs_at_once(chip, line) == line["programs"], "what splits are counted by"


def programs_at_once(chip: str, line: dict) -> int:
    """Return how many programs fit a multiprocessor.

    It keeps a kilobyte for each, and hands out registers in eights.
    """
    threads = 32 * line["num_warps"]
    registers = -(-line["registers"] // 8) * 8
    shared_memory = (SHARED_MEMORY[chip] + 1024) // (line["shared_memory"] + 1024)
    return min(65536 // (registers * threads), shared_memory)


@pytest.mark.slow
@pytest.mark.parametrize("chip", SHARED_MEMORY)
def test_ahead_of_time_all(chip):
    """Every configuration compiles for a chip within its registers and shared memory."""
    check(chip, ALL_CASES)


IDS = 4096
NUMBERS_OF_ROWS = (256, 1, 16, 17, 100, 272)
# Logits as projected, their cap, whether anybody adjusts them.
LOGITS = [
    (torch.bfloat16, 30.0, False),
    (torch.bfloat16, 30.0, True),
    (torch.float32, None, True),
    (torch.float16, 30.0, False),
]


def row_logits(num_rows, dtype, softcap, adjusted):
    from attention_kernels.vocab_statistics import LogitAdjustments, RowLogits

    adjustments = None
    if adjusted:
        index, words, counts = empty(num_rows), empty(4, IDS // 32), empty(4, IDS)
        listed, offsets = empty(4, 2048), empty(4, 2048, dtype=torch.float32)
        number = empty(4, dtype=torch.float32)
        lists, penalties = (index, listed, offsets, number), (index, number, number, number)
        adjustments = LogitAdjustments(*lists, *penalties, words, counts, index, words, index)
    return RowLogits(empty(num_rows, IDS, dtype=dtype), 4096, softcap, adjustments)


def statistics_launches(num_rows: int = 256) -> Iterator[tuple[str, tuple]]:
    """Yield each kernel with its arguments, by its name and its logits."""
    for case in LOGITS:
        for name, launch in launches_of(row_logits(num_rows, *case)):
            yield f"{name}, {case}", launch


def launches_of(logits):
    from attention_kernels.vocab_statistics.running import RowDraws, RunningStatistics
    from attention_kernels.vocab_statistics.search import Piece
    from attention_kernels.vocab_statistics.triton import kept_rows, narrow, update

    num_rows = len(logits.projected)
    number, integer = empty(num_rows, dtype=torch.float32), empty(num_rows)
    keys = integer.long()
    draws = RowDraws(number, number, keys, integer, integer, integer)
    running = RunningStatistics.empty(num_rows, torch.device("meta"))
    weights = empty(num_rows, IDS, dtype=logits.projected.dtype)
    product = empty(num_rows, 2816, dtype=torch.float32)
    pivots, bounds = keys[:, None].expand(num_rows, 16), keys[:, None].expand(num_rows, 2)
    calls = {
        "update": lambda: update.update_statistics(running, logits, draws, weights, product),
        "plain update": lambda: update.update_statistics(running, logits, draws, None, None),
        "scaled": lambda: kept_rows.scaled_logits(logits, number),
        "largest": lambda: kept_rows.largest_logit(logits, number),
        "count": lambda: kept_rows.weigh(logits, number, number, pivots, bounds, False),
        "mass": lambda: kept_rows.weigh(logits, number, number, pivots, bounds, True),
        "one mass": lambda: kept_rows.weigh(logits, number, number, keys[:, None], bounds, True),
        "narrow": lambda: narrow(Piece(bounds, pivots, keys), pivots, keys),
        "draw": lambda: kept_rows.draw(logits, number, number, keys, draws),
    }
    if logits.adjustments is not None and logits.projected.dtype != torch.float32:
        # The search is compiled once per type.
        del calls["narrow"]
    with recorded() as launches:
        for call in calls.values():
            call()
    return zip(calls, launches, strict=True)


# Forty kernels; those of attention are compiled more often.
@pytest.mark.slow
@pytest.mark.parametrize("chip", SHARED_MEMORY)
def test_vocab_statistics_ahead_of_time(chip):
    """Every kernel of the statistics compiles for a chip without spills, within its baselines."""
    lines = reports(chip, "statistics")
    for line in lines:
        if "update" in line["case"] and "False" in line["case"]:
            # Four programs of 256 threads share the registers of a multiprocessor.
            assert line["registers"] <= 64, line
    check_baselines("statistics", chip, lines)


def test_no_number_of_rows_compiles_a_kernel_anew():
    """Launches for 1 row, multiples of 16 and other numbers share a compilation."""
    lines = run_uninterpreted(__file__, "sm_90", "variants")
    found = {(line["case"], line["variant"]) for line in lines}
    assert len(found) == len({case for case, _ in found}) == len(lines) // len(NUMBERS_OF_ROWS)


def combine_launch(head_dim: int) -> tuple:
    """Return the kernel that combines two splits of a canvas of ``impl="cute"``."""
    from attention_kernels.canvas_attention.cute import combine

    out = empty(256, 16, head_dim, dtype=torch.bfloat16)
    parts, sums = (empty(*shape, dtype=torch.float32) for shape in ((2, *out.shape), (2, 16, 256)))
    with recorded() as launches:
        combine.combine_splits(parts, sums, empty(2), empty(1), out)
    (launch,) = launches
    return launch


@pytest.mark.parametrize("chip", ["sm_90", "sm_100"])
def test_combine_ahead_of_time(chip):
    """Both head sizes compile without a spill, for several programs per multiprocessor."""
    lines = reports(chip, "combine")
    assert len(lines) == 2
    # Of 65,536, 128 threads each.
    assert all(line["registers"] <= 128 for line in lines), lines


def attention_reports(chip: str, cases: list[Case], *, loops: bool) -> Iterator[dict]:
    from attention_kernels.canvas_attention.triton.configs import tuned_config

    architecture = chip.removeprefix("sm_")
    capability = int(architecture[:-1]), int(architecture[-1])
    for case in cases:
        dtypes = getattr(torch, case.query_dtype), getattr(torch, case.cache_dtype)
        programs = tuned_config(case.head_dim, *dtypes, capability).programs
        for launch in attention_launches(case, capability):
            report = compile_for(chip, *launch, loops=loops)
            name = f"{report['kernel']}, head size {case.head_dim}"
            yield report | {"case": name, "chip": chip, "programs": programs, **asdict(case)}


def main(chip: str, task: str = "attention", given: str = "") -> None:
    """Print a report of each kernel of a task; of attention in the given cases, or in all."""
    if task == "attention":
        cases = [Case(**case) for case in json.loads(given)] if given else ALL_CASES
        found = attention_reports(chip, cases, loops=not given)
    elif task == "combine":
        found = (compile_for(chip, *combine_launch(head_dim)) for head_dim in (256, 512))
    elif task == "statistics":
        found = (
            {"case": case} | compile_for(chip, *launch) for case, launch in statistics_launches()
        )
    else:
        found = (
            {"case": case, "variant": variant(*launch)}
            for num_rows in NUMBERS_OF_ROWS
            for case, launch in statistics_launches(num_rows)
        )
    for report in found:
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
