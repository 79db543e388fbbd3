"""Kernels that serving would launch for the 26B shape, compiled ahead of time, beside stock's.

    python benchmarks/gpu/compiled.py                     # SM80, 90, 100, 120
    python benchmarks/gpu/compiled.py --chips sm_90 --write

Needs vLLM and no GPU. Counted are the machine's instructions in the loop over keys or ids, those of
all warps together, of 64 query rows (rows times heads) for attention and of one row for statistics.
Issue cycles are these over the four that a multiprocessor issues at once, tensor-core cycles the
least that the products of a key take; neither is a time: what loads cost is in no count. A row in
which ours is above another names the experiment of the campaign that decides it. ``--write`` puts
the table into ``docs/develop/gpu-figures.md``.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

# What it shares with the other benchmarks.
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

from records import ROOT, Rows, markdown, parser_of, write_part

CUTE = ROOT / "tests/kernels/test_cute_ahead_of_time.py"
CHIPS = ("sm_80", "sm_90", "sm_100", "sm_120")
# bf16 operations of a multiprocessor and cycle, dense, summed in float32. From data sheets: A100, H100,
# B200, RTX PRO 6000.
TENSOR_OPERATIONS = {"sm_80": 2048, "sm_90": 4096, "sm_100": 8192, "sm_120": 1024}
# Of a multiprocessor.
REGISTERS, THREADS = 65536, {"sm_80": 2048, "sm_90": 2048, "sm_100": 2048, "sm_120": 1536}
SHARED_BYTES = {"sm_80": 164, "sm_90": 228, "sm_100": 228, "sm_120": 100}
# What the system keeps of it for each program, and what registers are handed out in.
RESERVED_BYTES, REGISTER_UNIT = 1024, 8
SCHEDULERS, ROWS = 4, 64
# The experiment that times what is compared here.
DECIDES = {
    "attention, sliding": "attention",
    "attention, full": "attention",
    "statistics": "sampler",
}


# A kernel and its arguments.
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """A kernel on a chip.

    Attributes:
        chip: As ``sm_90``.
        what: Which of the model's layers or steps it is of.
        whose: ``"ours"``, ``"stock"``, or ``"FlashAttention-4"``: that of ``impl="cute"``, which extends
            stock's default on Hopper.
        kernel: Its name.
        registers: Of a thread.
        spilled_bytes: Stores and loads.
        shared_memory: Bytes of a program.
        programs: That fit a multiprocessor at once.
        instructions: A key of 64 rows, or an id of one, each counted once for 32 threads; ``None`` for
            what goes over neither.
        issue_cycles: The same over what is issued at once.
        tensor_cycles: Of a key of 64 rows; ``None`` for statistics.
        least_instructions: Of an id in a block that needs nothing that can be left out.
    """

    chip: str
    what: str
    whose: str
    kernel: str
    registers: int
    spilled_bytes: int
    shared_memory: int
    programs: int
    instructions: float | None
    issue_cycles: float | None
    tensor_cycles: float | None
    least_instructions: float | None = None


def capability(chip: str) -> tuple[int, int]:
    """``sm_120`` -> (12, 0)."""
    number = chip.removeprefix("sm_")
    return int(number[:-1]), int(number[-1])


def recorded(module: Any, name: str, call: Any) -> Launch:
    """The one launch of a kernel that a call makes."""
    found = []
    kernel = getattr(module, name)

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: found.append((kernel, args, kwargs))

    with mock.patch.object(module, name, Recorder()):
        call()
    (launch,) = found
    return launch


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def stock_attention(case: Any, chip: str) -> Launch:
    """What vLLM's Triton back end launches for canvases, with its flag per sequence."""
    from vllm.v1.attention.ops import triton_unified_attention as stock

    num_seqs, canvas, num_heads = 4, 256, 16
    query = empty(num_seqs * canvas, num_heads, case.head_dim, dtype=torch.bfloat16)
    cache = empty(64, case.num_kv_heads, 16, 2 * case.head_dim, dtype=torch.bfloat16).transpose(
        1, 2
    )
    platform = SimpleNamespace(
        is_device_capability_family=lambda family: family // 10 == capability(chip)[0],
        fp8_dtype=lambda: torch.float8_e4m3fn,
    )

    def call() -> None:
        stock.unified_attention(
            q=query,
            k=cache[..., : case.head_dim],
            v=cache[..., case.head_dim :],
            out=torch.empty_like(query),
            cu_seqlens_q=empty(num_seqs + 1),
            max_seqlen_q=canvas,
            seqused_k=empty(num_seqs),
            max_seqlen_k=case.max_seq_len,
            softmax_scale=0.0625,
            causal=empty(num_seqs),
            window_size=(case.window_left, 0) if case.window_left >= 0 else (-1, -1),
            block_table=empty(num_seqs, case.max_seq_len // 16),
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )

    with mock.patch.object(stock, "current_platform", platform):
        return recorded(stock, "kernel_unified_attention", call)


def stock_statistics() -> Launch:
    """What vLLM's sampler launches on logits that it has capped and widened before."""
    from vllm.model_executor.models import diffusion_gemma_sampler as stock

    logits = empty(256, 262144, dtype=torch.float32)
    temperatures = empty(1, dtype=torch.float32)
    return recorded(
        stock,
        "_row_stats_kernel",
        lambda: stock.sample_row_stats(logits, temperatures, 256, 0, torch.bfloat16),
    )


def our_statistics() -> Launch:
    """A tile of the plain step."""
    from tests.kernels import test_vocab_statistics_ahead_of_time as ahead

    logits = ahead.row_logits(torch.bfloat16, 30.0, False)
    launch: Launch = next(ahead.recorded_launches(logits))[1]
    return launch


def flash_attention_4(case: Any, what: str) -> Iterator[Row]:
    """What ``impl="cute"`` runs on Hopper, compiled in a process of its own.

    A third of its warps load and the others multiply; counted are both, in tiles that are seen whole.
    """
    tile_m, tile_n = (64, 64) if case.head_dim > 256 else (128, 64)
    window = "none" if case.window_left < 0 else "canvas"
    described = {"head_dim": case.head_dim, "window": window, "group": 16 // case.num_kv_heads}
    with tempfile.TemporaryDirectory() as folder:
        # It leaves what it compiled where it runs.
        done = subprocess.run(
            [sys.executable, CUTE, "sm_90a", "compile", json.dumps([described])],
            cwd=folder,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    (line,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    multiply = min(one["instructions"] for one in line["loops"] if one["tensor"])
    load = max(one["instructions"] for one in line["loops"] if not one["tensor"])
    report = {
        "kernel": "CanvasAttentionSm90",
        "num_warps": 12,
        "registers": line["registers"],
        "spilled_bytes": line["stack"],
        "shared_memory": line["shared_memory"],
    }
    of_warps = 8 * multiply + 4 * load
    tensor = 4 * ROWS * case.head_dim / TENSOR_OPERATIONS["sm_90"]
    instructions = of_warps / tile_n * ROWS / tile_m
    yield row("sm_90", what, "FlashAttention-4", report, instructions, tensor)


def rows(chip: str) -> Iterator[Row]:
    """Every kernel of a chip. Not in a process with Triton's interpreter."""
    from attention_kernels.vocab_statistics.triton.update import WIDER
    from tests.kernels.test_ahead_of_time import MODEL_CASES, recorded_launches
    from tests.support.triton_compile import compile_for

    for name, case in zip(("sliding", "full"), MODEL_CASES, strict=True):
        what = f"attention, {name}"
        ours, *combine = recorded_launches(case, capability(chip))
        for launch in combine:
            yield row(chip, f"{what}, split", "ours", compile_for(chip, *launch), None, None)
        stock = stock_attention(case, chip)
        for whose, (kernel, args, kwargs) in (("ours", ours), ("stock", stock)):
            tile = kwargs["BLOCK_M"], kwargs["BLOCK_N" if whose == "ours" else "TILE_SIZE"]
            report = compile_for(chip, kernel, args, kwargs, loops=True)
            # What spins on a barrier is a loop too; the one over keys multiplies most.
            loop = max(report["loops"], key=lambda one: one["tensor"])
            of_warps = loop["instructions"] * report["num_warps"]
            # Programs for parts of the values compute the same scores.
            parts = kwargs["BLOCK_D"] // kwargs["BLOCK_V"] if whose == "ours" else 1
            operations = 2 * (parts + 1) * ROWS * case.head_dim
            yield row(
                chip,
                what,
                whose,
                report,
                of_warps * parts / tile[1] * ROWS / tile[0],
                operations / TENSOR_OPERATIONS[chip],
            )
        if chip == "sm_90":
            yield from flash_attention_4(case, what)
    for whose, launch in (("ours", our_statistics()), ("stock", stock_statistics())):
        report = compile_for(chip, *launch, loops=True)
        block = launch[2].get("B") or launch[2]["BLOCK"]
        # One for the maximum and one for the sums; the third goes over the embedding, or writes.
        loops, blocks = report["loops"][:2], (WIDER, 1)
        if whose == "stock":
            loops = sorted(report["loops"], key=lambda one: one["instructions"])[-2:]
            blocks = (1, 1)
        most, least = (
            sum(one[count] / wide for one, wide in zip(loops, blocks, strict=True))
            * report["num_warps"]
            / block
            for count in ("instructions", "least")
        )
        yield row(chip, "statistics", whose, report, most, None, least)


def row(
    chip: str,
    what: str,
    whose: str,
    report: dict[str, Any],
    instructions: float | None,
    tensor: float | None,
    least: float | None = None,
) -> Row:
    """With what follows from the compiler's report."""
    threads = 32 * report["num_warps"]
    registers = -(-report["registers"] // REGISTER_UNIT) * REGISTER_UNIT
    programs = min(
        REGISTERS // (registers * threads),
        SHARED_BYTES[chip] * 1024 // (report["shared_memory"] + RESERVED_BYTES),
        THREADS[chip] // threads,
    )
    return Row(
        chip,
        what,
        whose,
        report["kernel"],
        report["registers"],
        report["spilled_bytes"],
        report["shared_memory"],
        programs,
        None if instructions is None else round(instructions, 2),
        None if instructions is None else round(instructions / SCHEDULERS, 2),
        None if tensor is None else round(tensor, 2),
        None if least is None else round(least, 2),
    )


def compiled(chip: str) -> list[Row]:
    """The rows of a chip, from a process without Triton's interpreter."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), str(ROOT / "benchmarks"), environment.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, __file__, "--chip", chip],
        env=environment
        | {
            "PYTHONPATH": os.pathsep.join(paths),
            # Stock vLLM keeps its kernels as they are then, and looks for no driver.
            "VLLM_PLUGINS": "",
            "CUDA_VISIBLE_DEVICES": "",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [Row(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith("{")]


def decided_by(one: Row, others: list[Row]) -> str:
    """The experiment, where ours has more instructions than another."""
    if one.whose != "ours" or one.instructions is None:
        return ""
    fewest = min(
        o.instructions
        for o in others
        if (o.chip, o.what) == (one.chip, one.what) and o.instructions is not None
    )
    return f"`{DECIDES[one.what]}`" if one.instructions > fewest else ""


HEADS = (
    *("chip", "kernel of", "whose", "registers", "spilled bytes", "shared memory"),
    *("programs a multiprocessor", "instructions a key or id", "issue cycles"),
    *("tensor-core cycles", "instructions at least", "decided by"),
)


def table(found: list[Row]) -> str:
    """As Markdown."""
    cells = [{**asdict(one), "decided_by": decided_by(one, found)} for one in found]
    return markdown(HEADS, [[v for k, v in one.items() if k != "kernel"] for one in cells])


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--write", action="store_true", help="into docs/develop/gpu-figures.md")
    parser.add_argument("--chip", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.chip:
        for one in rows(options.chip):
            print(json.dumps(asdict(one)), flush=True)
        return 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [one for of_chip in pool.map(compiled, options.chips) for one in of_chip]
    data = Rows(options.data)
    for one in found:
        data.add("compiled", **asdict(one), decided_by=decided_by(one, found))
    if options.write:
        write_part("compiled", table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
