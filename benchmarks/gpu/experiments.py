"""The experiments of the campaign, in order of what is learnt from them.

Each is a command of its own that writes its rows as it gets them (``benchmarks/data_file.py``), and
has a form at toy size, which rehearses it on a CPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

# What any experiment may take with its start, in minutes.
MOST_MINUTES = 8
# What all of them take together where they take what is expected.
ALL_MINUTES = 30

PYTHON = sys.executable


@dataclass(frozen=True)
class Experiment:
    """One command that answers one question.

    Attributes:
        name: Of its result.
        answers: The question.
        command: With ``{data}`` for the file of its rows and ``{out}`` for a folder of its own.
        toy: Its command at toy size on the CPU.
        expected: Minutes that it is expected to take; an estimate until it was run.
        limit: Minutes after which it is stopped.
        needs: See ``machine.lacking``.
        toy_needs: The same of its toy form.
        variables: Set for it in the environment; values as ``command``.
        toy_variables: Set at toy size, besides or instead.
    """

    name: str
    answers: str
    command: tuple[str, ...]
    toy: tuple[str, ...]
    expected: float
    limit: float
    needs: dict[str, Any] = field(default_factory=lambda: {"gpu": True})
    toy_needs: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    toy_variables: dict[str, str] = field(default_factory=dict)


def _script(path: str, *options: str) -> tuple[str, ...]:
    return (PYTHON, f"benchmarks/{path}", "--data", "{data}", *options)


def _serving(side: str, answers: str, expected: float) -> Experiment:
    variables = {
        "SIDES": side,
        "CONCURRENCY": "1 8",
        "OUT": "{out}",
        "DATA": "{data}",
        "ROUTING": "",
        "START_SECONDS": "360",
    }
    command = ("bash", "benchmarks/bench_serve.sh")
    return Experiment(
        f"serving-{side}",
        answers,
        command,
        command,
        expected,
        8,
        # 27 GB of weights, the cache, and room for the graphs.
        needs={"gpu": True, "vllm": True, "memory_gib": 40},
        toy_needs={"vllm": True},
        variables=variables,
        toy_variables={"CONCURRENCY": "1", "PROMPTS": "2", "STEPS": "4"},
    )


def _format(name: str, memory_gib: int, expected: float, capability: str = "8.0") -> Experiment:
    options = ("--formats", name, "--no-autoregressive")
    return Experiment(
        f"format-{name}",
        f"how near a pass of {name} at one request comes to what memory can read",
        _script("bench_formats.py", *options, "--prompts", "4"),
        _script("bench_formats.py", *options, "--shape", "tiny", "--prompts", "1", "--steps", "4"),
        expected,
        8,
        needs={
            "gpu": True,
            "vllm": True,
            "memory_gib": memory_gib,
            "capability": capability,
        },
        toy_needs={"vllm": True},
    )


EXPERIMENTS = (
    Experiment(
        "probe",
        "what the device reaches, and whether it does what the kernels rely on",
        _script("gpu/probe.py"),
        _script("gpu/probe.py"),
        expected=0.6,
        limit=3,
    ),
    Experiment(
        "counters",
        "what a pass costs this host; known without a GPU, and compared by tests",
        _script("gpu/counters.py"),
        _script("gpu/counters.py"),
        expected=0.3,
        limit=2,
        needs={},
    ),
    Experiment(
        "kernels",
        "whether the kernels, executed, compute what the references do",
        _script("gpu/check_kernels.py"),
        _script("gpu/check_kernels.py", "--toy"),
        expected=2,
        limit=5,
    ),
    Experiment(
        "graphs",
        "whether a captured step, replayed, is bit for bit the eager one",
        _script("gpu/check_graphs.py"),
        _script("gpu/check_graphs.py", "--toy"),
        expected=1.5,
        limit=5,
    ),
    Experiment(
        "attention",
        "attention beside stock's kernels and cut in other ways, short and long contexts",
        _script(
            "bench_canvas_attention.py",
            *("--requests", "1", "8", "--contexts", "1024", "8192", "32768"),
            *("--phases", "denoise", "--peers", "cute", "cute-unsplit", "cute-split-4"),
            *("stock-triton", "stock-fa4", "stock-fa3"),
            *("unsplit", "split-2", "split-4", "rows-64", "keys-16", "keys-64"),
        ),
        _script(
            "bench_canvas_attention.py",
            *("--requests", "1", "--contexts", "20", "--phases", "denoise"),
            *("--peers", "unsplit", "split-2", "keys-16"),
        ),
        expected=2.5,
        limit=6,
    ),
    Experiment(
        "sampler",
        "sampling in graphs beside stock's, and how wide a tile should be",
        _script("bench_sampler.py", "--settings", "--tiles", "4096", "16384", "32768"),
        _script(
            "bench_sampler.py",
            *("--canvases", "1", "--hidden", "16", "--repeats", "1", "--tiles", "8192"),
        ),
        expected=1.5,
        limit=6,
    ),
    Experiment(
        "sampler-variants",
        "what a second stream gains, and what leaving out the unlikely does as rows settle",
        _script(
            "bench_sampler.py",
            *("--canvases", "1", "2", "8", "--tiles", "16384", "--two-streams"),
            *("--settled", "0", "0.5", "0.9", "1", "--repeats", "10"),
        ),
        _script(
            "bench_sampler.py",
            *("--canvases", "1", "--hidden", "16", "--repeats", "1"),
            *("--two-streams", "--settled", "0", "1"),
        ),
        expected=1,
        limit=5,
    ),
    Experiment(
        "pass",
        "which kernels a pass spends its time in, outside the backbone",
        _script("gpu/profile_pass.py"),
        _script("gpu/profile_pass.py", "--toy"),
        expected=1,
        limit=4,
    ),
    _serving("ours", "tokens a second and first tokens, at 1 and 8 requests", 3.5),
    _serving("stock", "the same of stock vLLM as it comes", 3.5),
    _serving("tuned", "the same of stock vLLM, tuned", 3.5),
    Experiment(
        "order",
        "what a pass costs in the synchronous order and in the other, by which a start chooses",
        _script("bench_passes.py", "--orders", "fused", "asynchronous"),
        _script("bench_passes.py", "--orders", "fused", "--rounds", "1"),
        expected=1,
        limit=4,
        needs={"gpu": True, "vllm": True},
        toy_needs={"vllm": True},
    ),
    _format("fp8-dynamic", 40, 3.5),
    _format("nvfp4-weights", 30, 3.5),
    Experiment(
        "experts",
        "what tuned experts gain at the rows of 1 and 8 canvases",
        _script(
            "tune_experts.py",
            *("--dtype", "fp8", "--tp", "1", "--rows", "256", "2048", "--out", "{out}"),
        ),
        _script("tune_experts.py", "--tp", "1", "--out", "{out}"),
        expected=1.1,
        limit=8,
        needs={"gpu": True, "vllm": True},
        # It times a kernel that runs nowhere else.
        toy_needs={"gpu": True, "vllm": True},
    ),
)
