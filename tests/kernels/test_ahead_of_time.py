"""Every Triton configuration compiles for every chip without a GPU, and only one spills.

Triton compiles for a chip that is not there only in a process without its interpreter, so each chip
is checked by running this file. By hand it prints what the compiler reports, with the instructions
of the innermost loops; the one over keys multiplies most:

    python tests/kernels/test_ahead_of_time.py sm_90
"""

import json
import sys
from dataclasses import asdict, dataclass, replace

import pytest
import torch

from tests.support.counters import baselines
from tests.support.counters.chips import CHIPS
from tests.support.counters.triton_compile import (
    COMPILED,
    SHARED_MEMORY,
    compile_for,
    empty,
    recorded,
    run_uninterpreted,
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


def recorded_launches(case: Case, capability: tuple[int, int]) -> list[tuple]:
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


# Bytes a thread, by chip and head size. Sliding layers on SM100 take 68 instructions a key with 128
# rows a tile, what they spill outside the loop among them, and 108 with 64, which spill nothing; on
# SM80 it is variants for images that spill, and smaller tiles take half as many again.
SPILLS = {("sm_80", 256): 40, ("sm_80", 512): 40, ("sm_100", 256): 64}


def check(chip: str, cases: list[Case]) -> list[dict]:
    pytest.importorskip("triton")
    lines = run_uninterpreted(__file__, chip, json.dumps([asdict(case) for case in cases]))
    assert len(lines) >= len(cases)
    for line in lines:
        assert line["spilled_bytes"] <= SPILLS.get((chip, line["head_dim"]), 0), line
        assert line["shared_memory"] <= SHARED_MEMORY[chip], line
    return lines


@pytest.mark.parametrize("chip", CHIPS)
def test_ahead_of_time(chip):
    """The model's layers compile for a chip within its registers, shared memory and baselines."""
    triton = pytest.importorskip("triton")
    lines = check(chip, MODEL_CASES)
    found = {
        f"{line['kernel']}, head size {line['head_dim']}": {name: line[name] for name in COMPILED}
        for line in lines
    }
    baselines.check(f"attention, {chip}, Triton {triton.__version__}", found)
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


def main(chip: str, cases: str | None = None) -> None:
    from attention_kernels.canvas_attention.triton.configs import tuned_config

    architecture = chip.removeprefix("sm_")
    capability = int(architecture[:-1]), int(architecture[-1])
    selected = [Case(**case) for case in json.loads(cases)] if cases else ALL_CASES
    for case in selected:
        for launch in recorded_launches(case, capability):
            dtypes = getattr(torch, case.query_dtype), getattr(torch, case.cache_dtype)
            programs = tuned_config(case.head_dim, *dtypes, capability).programs
            report = compile_for(chip, *launch, loops=cases is None)
            report |= {"chip": chip, "programs": programs, **asdict(case)}
            print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
