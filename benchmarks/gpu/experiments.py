"""The experiments of the campaign, in order of what is learnt from them.

Each is a script of ``benchmarks/`` that writes its rows as it gets them (``data_file.py``), and has a
form at toy size, which rehearses it on a CPU.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

# Minutes that an experiment may take with its start.
MOST_MINUTES = 8
# Minutes that all of them take together where they take what is expected.
ALL_MINUTES = 48


@dataclass(frozen=True)
class Needs:
    """What an experiment cannot run without.

    Attributes:
        gpu: Whether it needs an NVIDIA GPU.
        vllm: Whether it needs vLLM.
        memory_gib: Memory of the GPU.
    """

    gpu: bool = True
    vllm: bool = False
    memory_gib: int = 0


SERVES = Needs(vllm=True)
CHECKPOINTS = "vllm_diffusion/checkpoints"
# Of a target that is not a diffusion model, whose steps nothing fixes.
TARGET = f"--model {CHECKPOINTS}/tiny_qwen3 --sides ours"
ANYWHERE = Needs(gpu=False)
# vLLM on its CPU platform.
ENGINE = Needs(gpu=False, vllm=True)


@dataclass(frozen=True)
class Experiment:
    """One command that answers one question.

    Attributes:
        name: Name of its result.
        answers: The question.
        script: A script below ``benchmarks/`` and its options; ``{out}`` is a folder of its own.
        toy: The same at toy size on the CPU.
        expected: Minutes that it is expected to take; an estimate until it was run.
        limit: Minutes after which it is stopped.
        needs: What it needs at full size.
        toy_needs: What it needs at toy size.
    """

    name: str
    answers: str
    script: str
    toy: str
    expected: float
    limit: float
    needs: Needs = Needs()
    toy_needs: Needs = ANYWHERE

    def command(self, toy: bool, data: str, out: str) -> Sequence[str]:
        """Words to run, at full or toy size, with the file of its rows and its folder."""
        path, *options = shlex.split(self.toy if toy else self.script)
        options = [option.format(out=out) for option in options]
        return [sys.executable, f"benchmarks/{path}", "--data", data, *options]


def _serving(side: str, answers: str) -> Experiment:
    script = f"bench_serve.py --sides {side} --out {{out}} --start-seconds 360"
    # 27 GB of weights, the cache, and room for the graphs.
    needs = Needs(vllm=True, memory_gib=40)
    lengths = "--input-len 4096 --output-len 1024 --max-model-len 6144 --prompts 8"
    full = f"{script} --concurrency 1 8 32 {lengths}"
    toy = f"{script} --concurrency 1 --prompts 2 --steps 4"
    return Experiment(f"serving-{side}", answers, full, toy, 4, 8, needs, ENGINE)


def _shape(
    name: str, answers: str, model: str, options: str, *, toy: str = "", expected: float = 2.5
) -> Experiment:
    """A shape of another family, whose toy is the shipped SDAR unless ``toy`` names another."""
    script = f"bench_serve.py --out {{out}} --start-seconds 360 {options}"
    toy = toy or f"--model {CHECKPOINTS}/tiny_sdar --sides ours --steps 2"
    full = f"{script} --model benchmarks/configs/{model}"
    small = f"bench_serve.py --out {{out}} --concurrency 1 --prompts 2 {toy}"
    needs = Needs(vllm=True, memory_gib=40)
    return Experiment(name, answers, full, small, expected, 8, needs, ENGINE)


def _draft(folder: str) -> str:
    """Options of a server whose draft is a folder's, for a block of 16 or of the toy's 8."""
    method = "--speculative-config.method dflash"
    tokens = 7 if folder.startswith(CHECKPOINTS) else 15
    count = f"--speculative-config.num_speculative_tokens {tokens}"
    return f"--options='{method} --speculative-config.model {folder} {count}'"


def _format(name: str, memory_gib: int) -> Experiment:
    script = f"bench_formats.py --formats {name} --no-autoregressive"
    answers = f"how near a pass of {name} at one request comes to what memory can read"
    full, toy = f"{script} --prompts 4", f"{script} --shape tiny --prompts 1 --steps 4"
    needs = Needs(vllm=True, memory_gib=memory_gib)
    return Experiment(f"format-{name}", answers, full, toy, 3.5, 8, needs, ENGINE)


EXPERIMENTS = (
    Experiment(
        "probe",
        "what the device reaches, and whether it does what the kernels rely on",
        "gpu/probe.py",
        "gpu/probe.py",
        expected=0.6,
        limit=3,
    ),
    Experiment(
        "kernels",
        "whether kernels and their graphs, executed, compute what the references do eagerly",
        "gpu/check_gpu.py",
        "gpu/check_gpu.py --toy",
        expected=2,
        limit=5,
    ),
    Experiment(
        "tune",
        "how long a first self-check takes, and which of the kernels that are right are the fastest",
        "gpu/choose_kernels.py --out {out}",
        "gpu/choose_kernels.py --out {out}",
        expected=4,
        limit=8,
        needs=SERVES,
        # It times kernels as a GPU runs them.
        toy_needs=SERVES,
    ),
    _serving("ours", "tokens a second and first tokens, at 1, 8 and 32 requests"),
    _serving("stock", "the same of stock vLLM as it comes"),
    _serving("tuned", "the same of stock vLLM, tuned"),
    _shape(
        "llada2.2",
        "the first block behind a long prompt, and a pass there",
        "llada2.2-mini",
        "--sides ours --steps 8 --concurrency 1 --prompts 2 --output-len 256 "
        "--input-len 8192 32768 122000 --max-model-len 131072",
    ),
    _shape(
        "llada2.1",
        "tokens a second of blocks of 32 and a mixture of experts, at 1 and 16 requests",
        "llada2.1-mini",
        "--sides ours --steps 8 --concurrency 1 16 --prompts 4",
    ),
    _shape(
        "sdar",
        "tokens a second of blocks of 4 and dense layers, at 1 and 16 requests",
        "sdar-8b",
        "--sides ours --steps 2 --concurrency 1 16 --prompts 4",
    ),
    _shape(
        "draft",
        "what a step with a DFlash draft takes, ours and stock's, where nothing is accepted",
        "qwen3-8b",
        "--sides ours stock --concurrency 1 --prompts 4 --output-len 256 "
        + _draft("benchmarks/configs/qwen3-8b-dflash"),
        toy=f"{TARGET} {_draft(f'{CHECKPOINTS}/tiny_qwen3_dflash')}",
        expected=4,
    ),
    _shape(
        "draft-none",
        "what a step without a draft takes",
        "qwen3-8b",
        "--sides ours --concurrency 1 --prompts 4 --output-len 256",
        toy=TARGET,
        expected=2,
    ),
    Experiment(
        "counters",
        "what a pass costs this host; known without a GPU, and compared by tests",
        "gpu/counters.py",
        "gpu/counters.py",
        expected=0.3,
        limit=2,
        needs=ANYWHERE,
    ),
    Experiment(
        "attention",
        "attention beside stock's kernels and cut in other ways, short and long contexts",
        "bench_canvas_attention.py --requests 1 8 --contexts 1024 8192 32768 --phases denoise "
        "--peers cute cute-unsplit cute-split-4 stock-triton stock-fa4 stock-fa3 "
        "unsplit split-2 split-4 rows-64 keys-16 keys-64",
        "bench_canvas_attention.py --requests 1 --contexts 20 --phases denoise "
        "--peers unsplit split-2 keys-16",
        expected=2.5,
        limit=6,
    ),
    Experiment(
        "sampler",
        "sampling in graphs beside stock's, and how wide a tile should be",
        "bench_sampler.py --settings --tiles 4096 16384 32768",
        "bench_sampler.py --canvases 1 --hidden 16 --repeats 1 --tiles 8192",
        expected=1.5,
        limit=6,
    ),
    Experiment(
        "sampler-variants",
        "what a second stream gains, and what leaving out the unlikely does as rows settle",
        "bench_sampler.py --canvases 1 2 8 --tiles 16384 --two-streams "
        "--settled 0 0.5 0.9 1 --repeats 10",
        "bench_sampler.py --canvases 1 --hidden 16 --repeats 1 --two-streams --settled 0 1",
        expected=1,
        limit=5,
    ),
    Experiment(
        "pass",
        "which kernels a pass spends its time in, outside the backbone",
        "gpu/profile_pass.py",
        "gpu/profile_pass.py --toy",
        expected=1,
        limit=4,
    ),
    Experiment(
        "order",
        "what a pass costs in the synchronous order and in the other, by which a start chooses",
        "bench_passes.py --orders fused asynchronous",
        "bench_passes.py --orders fused --rounds 1",
        expected=1,
        limit=4,
        needs=SERVES,
        toy_needs=ENGINE,
    ),
    _format("fp8-dynamic", 40),
    _format("nvfp4-weights", 30),
    Experiment(
        "experts",
        "what tuned experts gain at the rows of 1 and 8 canvases",
        "tune_experts.py --dtype fp8 --tp 1 --rows 256 2048 --out {out}",
        "tune_experts.py --tp 1 --out {out}",
        expected=1.1,
        limit=8,
        needs=SERVES,
        # It times a kernel that runs nowhere else.
        toy_needs=SERVES,
    ),
)
