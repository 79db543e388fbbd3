"""Time and memory of sampling a pass: hidden rows in, statistics and soft embeddings out.

    python benchmarks/bench_sampler.py                      # 1, 8 and 32 canvases
    python benchmarks/bench_sampler.py --canvases 1 --vocab 262144 --hidden 2816
    python benchmarks/bench_sampler.py --settings           # what sampling settings add

Stock vLLM projects all rows, caps them in float32, reads them for its statistics and multiplies the
probabilities with the embedding; ours streams the vocabulary (docs/architecture.md). Both get the
same rows and the same weights, and the entropies and argmaxes are compared before anything is
timed. Peak memory is what a call adds: of the allocator on a GPU, counted from tensors on a CPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attention_kernels.testing import TensorMemory
from attention_kernels.vocab_statistics import RowDraws
from vllm_diffusion.sampling.candidate_filters import CandidateFilters
from vllm_diffusion.sampling.logprobs import LogprobsRequest
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.row_requests import FilteredRows, ReportedRows, RowRequests
from vllm_diffusion.sampling.vocabulary_stream import sample_rows

SOFTCAP = 30.0
# What stock's tensors take of a logit: 4 bytes of float32 logits, 2 of probabilities in bf16 and,
# before the cap, 2 of what the product returned.
STOCK_BYTES_PER_LOGIT = 8


def stock(rows: Tensor, weight: Tensor, canvas: int) -> tuple[Tensor, Tensor, Tensor]:
    """Argmax, entropy and soft embedding by the functions of vLLM's own sampler."""
    from vllm.model_executor.models.diffusion_gemma import _softcap_logits
    from vllm.model_executor.models.diffusion_gemma_sampler import (
        sample_row_stats,
        sample_row_stats_reference,
    )

    temperatures = torch.ones(rows.shape[0] // canvas, device=rows.device)
    logits = _softcap_logits(F.linear(rows, weight), SOFTCAP)
    if rows.is_cuda:
        argmax, _, entropy, probs = sample_row_stats(logits, temperatures, canvas, 0, weight.dtype)
    else:
        argmax, _, entropy, probs = sample_row_stats_reference(
            logits, temperatures, canvas, weight.dtype
        )
    return argmax, entropy, probs @ weight


def ours(
    rows: Tensor, head: OutputHead, *settings: FilteredRows | ReportedRows | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by this package."""
    n, device = rows.shape[0], rows.device
    ones = torch.ones(n, device=device)
    zeros = torch.zeros(n, dtype=torch.int32, device=device)
    draws = RowDraws(ones, ones, zeros.long(), zeros, zeros, zeros)
    results = sample_rows(head, rows, RowRequests(draws, None, *settings), head.weight.shape[0])
    assert results.soft_embeds is not None
    return results.argmax, results.entropy, results.soft_embeds


def sampling_settings(
    canvas: int, num_rows: int, device: torch.device
) -> dict[str, tuple[FilteredRows | None, ReportedRows | None]]:
    """What one or all requests of a pass ask for beyond the plain step."""
    found = {}
    for who, n in (("one canvas", canvas), ("every canvas", num_rows)):
        index, ones = np.arange(n), torch.ones(n, device=device)
        integers = torch.zeros(n, dtype=torch.int32, device=device)
        top_p = CandidateFilters(None, ones * 0.95, None)
        wanted = LogprobsRequest(5, integers.long()[:, None][:, :0], integers, as_logits=False)
        found[f"top_p, {who}"] = FilteredRows(index, top_p), None
        both = top_p._replace(top_k=integers + 64)
        found[f"top_k and top_p, {who}"] = FilteredRows(index, both), None
        found[f"logprobs, {who}"] = None, ReportedRows(index, wanted, None, ones)
    return found


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """What a call holds at most beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with TensorMemory() as memory:
        call()
    return memory.peak


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median of some calls after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[1:])


def disagreement(a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor]) -> str:
    """Empty if two results are the same up to rounding."""
    same = (a[0] == b[0]).float().mean().item()
    entropy = (a[1] - b[1]).abs().max().item()
    soft = ((a[2] - b[2]).norm() / b[2].norm()).item()
    # Equal logits in bf16 leave several right argmaxes.
    if same < 0.95 or entropy > 0.05 or soft > 0.05:
        return f"argmax equal in {same:.1%}, entropy off by {entropy:.3f}, embedding by {soft:.1%}"
    return ""


def main() -> int:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--canvases", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--canvas", type=int, default=256 if on_gpu else 8)
    parser.add_argument("--vocab", type=int, default=262144)
    parser.add_argument("--hidden", type=int, default=2816 if on_gpu else 64)
    parser.add_argument(
        "--settings", action="store_true", help="also top-k, top-p and log-probabilities"
    )
    parser.add_argument("--repeats", type=int, default=20 if on_gpu else 3)
    options = parser.parse_args()

    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    name = torch.cuda.get_device_name() if on_gpu else "CPU"
    print(
        f"{name}, torch {torch.__version__}: vocabulary {options.vocab}, hidden size "
        f"{options.hidden}, canvas {options.canvas}, {dtype}"
    )
    generator = torch.Generator(device).manual_seed(0)
    shape = (options.vocab, options.hidden)
    weight = torch.randn(shape, generator=generator, device=device).to(dtype) * 0.1
    head = OutputHead(weight, weight, 0, SOFTCAP, dtype, F.linear, 1, options.vocab)
    print("| canvases | which | ms | peak MiB | bytes a logit | of stock's 8 |")
    print("|---|---|---|---|---|---|")
    failures = []
    for canvases in options.canvases:
        n = canvases * options.canvas
        rows = torch.randn(n, options.hidden, generator=generator, device=device).to(dtype)
        calls = {
            "stock": lambda rows=rows: stock(rows, weight, options.canvas),
            "ours": lambda rows=rows: ours(rows, head),
        }
        if options.settings:
            for name, asked in sampling_settings(options.canvas, n, device).items():
                calls[f"ours, {name}"] = lambda rows=rows, asked=asked: ours(rows, head, *asked)
        problem = disagreement(calls["ours"](), calls["stock"]())
        if problem:
            failures.append(f"{canvases} canvases: {problem}")
        for which, call in calls.items():
            peak = peak_bytes(call, device)
            per_logit = peak / (n * options.vocab)
            print(
                f"| {canvases} | {which} | {milliseconds(call, device, options.repeats):.2f} "
                f"| {peak / 2**20:.1f} | {per_logit:.2f} "
                f"| 1/{STOCK_BYTES_PER_LOGIT / per_logit:.1f} |",
                flush=True,
            )
            # With settings a small pass may take 200 MiB.
            if which == "ours" and per_logit > 1:
                failures.append(f"{canvases} canvases: {per_logit:.2f} bytes a logit, not 1")
    if options.settings:
        print("Rows with settings are kept, which may take 200 MiB in a pass of any size.")
    for failure in failures:
        print(f"WRONG: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
