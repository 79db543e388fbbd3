"""The CuTe kernels compile for Hopper and Blackwell without a GPU, and trace the right visibility.

The CuTe DSL decides once per process which chip it compiles for, so each chip is checked by running
this file. By hand it prints what the compiler reports:

    python tests/kernels/test_cute_ahead_of_time.py sm_90a

A kernel cannot run here, but host code of the DSL can: the methods that the kernels trace to choose
and mask their tiles are compiled for this machine as well, and run against the reference mask.
"""

import contextlib
import importlib.util
import itertools
import json
import os
import random
import re
import sys
import tempfile
import types
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

from attention_kernels.canvas_attention.cute.launch import CuteKernel, compile_kernel
from tests.support.counters.triton_compile import run_uninterpreted, told_of
from tests.support.oracles.kernel_checks import walk_key_tiles

# Shared memory that one block can have, in bytes; the same on both chips.
SHARED_MEMORY = 227 * 1024
# The most stack, in bytes, that the stock kernels have at these head sizes: more would be our
# spills.
STACK = {"sm_90a": 0, "sm_100a": 432}
# What is added with splits, once a program, where a group's heads do not fill a tile evenly.
SPLIT_STACK = 8

# Of a traced sequence with splits.
NUM_SPLITS = 3

# What a kernel must not ask the classes that it extends.
STOCK_ANSWERS = {
    "BlockInfo": (
        "get_n_block_min_max",
        "get_n_block_min_causal_local_mask",
        "get_n_block_min_before_local_mask",
    ),
    "AttentionMask": ("apply_mask", "apply_mask_sm100"),
}


@dataclass(frozen=True)
class Case:
    """One kernel to compile."""

    head_dim: int
    window: str = "none"  # "none", "canvas", "query" or "left", which is "query" open on the right
    group: int = 2
    dtype: str = "bfloat16"
    softcap: float = 0.0
    split: bool = False

    def kernel(self, capability: int) -> CuteKernel:
        return CuteKernel(
            capability,
            self.head_dim,
            self.group,
            getattr(torch, self.dtype),
            self.softcap,
            has_window_left=self.window != "none",
            has_window_right=self.window == "query",
            canvas_anchor=self.window not in ("query", "left"),
            split=self.split,
        )


# The layers of DiffusionGemma-26B: sliding (16:8 x 256, window 1024) with both anchors, and full
# (16:2 x 512). A full layer of 256 stands in where 512 does not fit.
MODEL_CASES = {
    "sm_90a": [
        *(Case(256, "canvas"), Case(256, "query"), Case(512, group=8)),
        Case(512, group=8, split=True),
    ],
    "sm_100a": [
        *(Case(256, "canvas"), Case(256, "query"), Case(256, group=8)),
        Case(256, "canvas", split=True),
    ],
}
CHIPS = list(MODEL_CASES)


def all_cases(chip: str) -> list[Case]:
    head_dims = (256, 512) if chip == "sm_90a" else (256,)
    return [
        case
        for head_dim in head_dims
        for case in (
            *[Case(head_dim, window) for window in ("none", "canvas", "query", "left")],
            *[Case(head_dim, "canvas", group) for group in (1, 3, 8, 16)],
            Case(head_dim, "canvas", dtype="float16"),
            Case(head_dim, "canvas", softcap=50.0),
            *[Case(head_dim, split=True), Case(head_dim, "canvas", group=1, split=True)],
            *[Case(head_dim, "query", group=3, split=True)],
        )
    ]


def find_vllm_copy() -> None:
    """Let vLLM's copy be imported although its compiled parts have no driver here."""
    name = "vllm.vllm_flash_attn"
    try:
        importlib.import_module(name)
    except ImportError:
        package = types.ModuleType(name)
        root = importlib.util.find_spec("vllm").submodule_search_locations[0]
        package.__path__ = [str(Path(root, "vllm_flash_attn"))]
        sys.modules[name] = package


def compile_case(capability: int, case: Case) -> dict:
    """Compile one kernel, and return what the assembler made of it."""
    import cutlass

    allocate, sizes = cutlass.utils.SmemAllocator.allocate, []

    def recorded(self, kind, *args, **kwargs):
        sizes.append(kind.size_in_bytes())
        return allocate(self, kind, *args, **kwargs)

    stock = importlib.import_module(f"attention_kernels.canvas_attention.cute.sm{capability}0")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cutlass.utils.SmemAllocator, "allocate", recorded))
        # A warp that still asks stock's bookkeeping would visit other tiles, or wait for ever.
        for kind, names in STOCK_ANSWERS.items():
            for name in names:
                asked = AssertionError(f"the kernel asks stock's {kind}.{name}")
                stack.enter_context(
                    mock.patch.object(getattr(stock, kind), name, side_effect=asked)
                )
        compiled = compile_kernel(case.kernel(capability))
    report = told_of("cuobjdump", "-res-usage", cubin=compiled.artifacts.CUBIN)
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", report).groups())
    told = {"shared_memory": max(sizes), "registers": registers, "stack": stack}
    return asdict(case) | told


class TracedVisibility:
    """What a kernel traces to choose and mask its tiles, compiled for this machine instead.

    The instructions that the mask writes by hand, two shifts, are replaced by the same arithmetic.
    """

    def __init__(self, capability: int, case: Case) -> None:
        import cutlass
        import cutlass.cute as cute
        from cutlass import Int32
        from cutlass.cute.runtime import from_dlpack

        module = importlib.import_module(f"attention_kernels.canvas_attention.cute.sm{capability}0")
        self.canvas_anchor = case.window not in ("query", "left")
        self.masks_all = capability == 9  # vLLM's copy also asks about tiles that are seen whole
        self.has_left, self.has_right = case.window != "none", case.window == "query"
        self.group, (self.tile_m, self.tile_n) = case.group, case.kernel(capability).tile
        kernel = getattr(module, f"CanvasAttentionSm{capability}0")(
            *(cutlass.BFloat16, case.head_dim, case.group, (self.tile_m, self.tile_n)),
            *(0.0, self.canvas_anchor, case.split),
        )
        self.scores = torch.zeros(self.tile_m, self.tile_n)
        self.tiles = torch.zeros(4, dtype=torch.int32)
        self._scores, self._tiles = from_dlpack(self.scores), from_dlpack(self.tiles)
        group, tile_m, tile_n = self.group, self.tile_m, self.tile_n
        canvas_anchor, shifts, wide = self.canvas_anchor, module.utils, cutlass.Uint64

        def shift(value, by):
            return wide(cutlass.min(Int32(by), 32))

        shifts.shr_u32 = lambda value, by: cutlass.Uint32(wide(value) >> shift(value, by))
        shifts.shl_u32 = lambda value, by: cutlass.Uint32(wide(value) << shift(value, by))

        def sequence(query_len, seq_len, causal_rows):
            return types.SimpleNamespace(
                seqlen_q=query_len, seqlen_k=seq_len, causal_rows=causal_rows
            )

        @cute.jit
        def choose(
            tiles: cute.Tensor,
            query_len: Int32,
            seq_len: Int32,
            causal_rows: Int32,
            left: Int32 | None,
            right: Int32 | None,
            tile: Int32,
            split: Int32,
        ):
            known = sequence(query_len, seq_len, causal_rows)
            info = kernel.bookkeeping.canvas_block_info(
                tile_m,
                tile_n,
                False,
                True,
                case.split,
                left,
                right,
                qhead_per_kvhead_packgqa=group,
                canvas_anchor=canvas_anchor,
            )
            first, end = info.get_n_block_min_max(known, tile, split, Int32(NUM_SPLITS))
            tiles[0] = first
            tiles[1] = end
            tiles[2] = info.get_n_block_min_causal_local_mask(known, tile, first)
            tiles[3] = info.get_n_block_min_before_local_mask(known, tile, first)

        @cute.jit
        def hide(
            scores: cute.Tensor,
            query_len: Int32,
            seq_len: Int32,
            causal_rows: Int32,
            left: Int32 | None,
            right: Int32 | None,
            tile: Int32,
            key_tile: Int32,
        ):
            known = sequence(query_len, seq_len, causal_rows)
            mask = module.CanvasMask(
                tile_m, tile_n, known, left, right, group, canvas_anchor=canvas_anchor
            )
            if cutlass.const_expr(capability == 9):
                multiply, _ = kernel._get_tiled_mma()
                for thread in cutlass.range(multiply.size):
                    mine = multiply.get_slice(thread)
                    mask.apply_mask(
                        mine.partition_C(scores), m_block=tile, n_block=key_tile, thr_mma=mine
                    )
            else:
                for thread in cutlass.range(tile_m):
                    # A thread holds a row of the tile, its columns in order.
                    mask.apply_mask_sm100(
                        scores[thread, None],
                        m_block=tile,
                        n_block=key_tile,
                        thr_mma=types.SimpleNamespace(
                            partition_C=lambda whole: {((None, None), 0, 0): whole}
                        ),
                        thr_tmem_load=types.SimpleNamespace(
                            partition_D=lambda whole, row=thread: whole[row, None]
                        ),
                    )

        windows = [Int32(1) if given else None for given in (self.has_left, self.has_right)]
        given = [Int32(1)] * 3 + windows
        self.num_splits = NUM_SPLITS if case.split else 1
        self._choose = cute.compile(choose, self._tiles, *given, Int32(1), Int32(1))
        self._hide = cute.compile(hide, self._scores, *given, Int32(1), Int32(1))

    def mask(self, query_len: int, seq_len: int, causal_rows: int, left: int, right: int):
        """Return the mask of the kernel's walk over its tiles, bool [query_len, seq_len]."""
        from cutlass import Int32

        keys = -(-seq_len // self.tile_n) * self.tile_n
        num_tiles = -(-query_len * self.group // self.tile_m)
        seen = torch.zeros(num_tiles * self.tile_m, keys, dtype=torch.bool)
        windows = [None if size < 0 else Int32(size) for size in (left, right)]
        given = [*map(Int32, (query_len, seq_len, causal_rows)), *windows]
        for tile, split in itertools.product(range(num_tiles), range(self.num_splits)):
            rows = slice(tile * self.tile_m, (tile + 1) * self.tile_m)
            self._choose(self._tiles, *given, Int32(tile), Int32(split))
            if self.tiles[0] >= self.tiles[1]:
                continue
            for key_tile, masked in walk_key_tiles(*self.tiles.tolist(), self.has_left):
                self.scores.zero_()
                if masked or self.masks_all:
                    self._hide(self._scores, *given, Int32(tile), Int32(key_tile))
                columns = slice(key_tile * self.tile_n, (key_tile + 1) * self.tile_n)
                assert not seen[rows, columns].any(), "visited twice"
                seen[rows, columns] = self.scores == 0
        # The heads of a group see the same.
        by_head = seen[: query_len * self.group, :seq_len].view(query_len, self.group, seq_len)
        assert torch.equal(by_head.all(1), by_head.any(1))
        assert not seen[: query_len * self.group, seq_len:].any()
        return by_head.all(1)


def compare_visibility(capability: int, case: Case) -> dict:
    """Compare what traced rows see with the reference, on random sequences; return how many
    scores.
    """
    from attention_kernels.canvas_attention import Window
    from tests.support.oracles.kernel_checks import visibility_mask

    visible, draw, scores = TracedVisibility(capability, case), random.Random(0), 0
    for _ in range(100 if case.split else 300):
        query_len = draw.randint(1, 200)
        # Long enough for each split to be live, or some.
        seq_len = query_len + draw.choice([0, draw.randint(0, 900 if case.split else 300)])
        causal_rows = draw.choice([0, query_len, draw.randint(0, query_len)])
        left, right = (
            draw.choice([0, 2**30, draw.randint(1, 300)]) if given else -1
            for given in (visible.has_left, visible.has_right)
        )
        window = Window(left, right, "canvas" if visible.canvas_anchor else "query")
        expected = visibility_mask(query_len, seq_len, causal_rows, window)
        given = (query_len, seq_len, causal_rows, left, right)
        assert torch.equal(visible.mask(*given), expected), given
        scores += expected.numel()
    return {**asdict(case), "scores": scores}


def reports(chip: str, task: str, cases: list[Case]) -> list[dict]:
    """Return what a process of its own reports of each case of a task."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    source = "vllm" if chip == "sm_90a" else "flash_attn"
    if importlib.util.find_spec(source) is None:
        pytest.skip(f"needs the FlashAttention-4 inside {source}")
    with tempfile.TemporaryDirectory() as folder:
        given = json.dumps([asdict(case) for case in cases])
        found = run_uninterpreted(__file__, chip, task, given, CUTE_DSL_DUMP_DIR=folder)
    assert len(found) == len(cases)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS)
def test_cute_ahead_of_time_all(chip):
    """Every kind of kernel compiles for a chip within its registers and shared memory."""
    # A kernel that both lists have is compiled once in a process, so its second turn would record
    # nothing.
    cases = list(dict.fromkeys(MODEL_CASES[chip] + all_cases(chip)))
    for line in reports(chip, "compile", cases):
        assert line["shared_memory"] <= SHARED_MEMORY, line
        assert line["stack"] <= STACK[chip] + line["split"] * SPLIT_STACK, line


def rule_cases(chip: str) -> list[Case]:
    """Return every window, group and head size, and a sequence in splits."""
    whole = [
        Case(head_dim, window, group)
        for head_dim in ((256, 512) if chip == "sm_90a" else (256,))
        for window, group in (("none", 8), ("canvas", 2), ("query", 3), ("left", 1))
    ]
    return [*whole, Case(256, "canvas", split=True)]


@pytest.mark.parametrize(
    ("chip", "cases"),
    [
        # Both anchors, one of them in splits.
        ("sm_90a", [Case(256, "canvas", split=True), Case(512, "query", 3)]),
        *(pytest.param(chip, rule_cases(chip), marks=pytest.mark.slow) for chip in CHIPS),
    ],
)
def test_cute_traced_rule(chip, cases):
    """The tiles and masks that a chip's kernels trace amount to the reference mask, bit by bit."""
    assert all(line["scores"] > 0 for line in reports(chip, "visibility", cases))


def main(chip: str, task: str = "compile", given: str = "") -> None:
    """Run a task for a chip with some cases in JSON, or with all."""
    os.environ["CUTE_DSL_ARCH"] = os.environ["FLASH_ATTENTION_ARCH"] = chip
    # The only way to get at what was compiled.
    os.environ["CUTE_DSL_KEEP"] = "cubin"
    capability = int(chip.removeprefix("sm_").removesuffix("0a"))
    if capability == 9:
        find_vllm_copy()
    for case in [Case(**case) for case in json.loads(given)] if given else all_cases(chip):
        run = compare_visibility if task == "visibility" else compile_case
        print(json.dumps({"chip": chip, **run(capability, case)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
