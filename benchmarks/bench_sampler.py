"""Time and memory of sampling a pass: hidden rows in, statistics and soft embeddings out.

    python benchmarks/bench_sampler.py                      # 1, 8 and 32 canvases
    python benchmarks/bench_sampler.py --canvases 1 --vocab 262144 --hidden 2816
    python benchmarks/bench_sampler.py --settings           # what sampling settings add
    python benchmarks/bench_sampler.py --tiles 4096 16384   # ours, at other widths of a tile
    python benchmarks/bench_sampler.py --two-streams        # a tile projected beside the one before

Stock vLLM projects all rows, caps them in float32, reads them for its statistics and multiplies the
probabilities with the embedding; ours streams the vocabulary (docs/develop/architecture.md). Both
get the same rows and the same weights, and the entropies and argmaxes are compared before anything
is timed. Peak memory is what a call adds: of the allocator on a GPU, counted from tensors on a CPU.

On a GPU serving replays ours as a graph where nobody asks for settings: "ms, graph" is that
replay's time, "ms" the eager call's, in which the host may be what is measured. Without vLLM,
stock's column is empty and ours is compared with the same written plainly.
"""

import importlib.util
import sys
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from records import Rows, parser_of
from timing import as_served, milliseconds, place
from timing import device as the_device
from torch import Tensor

from attention_kernels.vocab_statistics import RowDraws, RowLogits
from tests.support.oracles.kernel_checks import TensorMemory
from vllm_diffusion.canvas.pass_rows import rows_of
from vllm_diffusion.sampling.candidate_filters import CandidateFilters, draw_filtered
from vllm_diffusion.sampling.logprobs import LogprobsRequest, row_logprobs
from vllm_diffusion.sampling.output_head import OutputHead
from vllm_diffusion.sampling.vocabulary_stream import sample_rows

SOFTCAP = 30.0
# Argmax, entropy and soft embedding of each row.
Sampled = tuple[Tensor, Tensor, Tensor]


def stock(rows: Tensor, weight: Tensor, canvas: int) -> Sampled:
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


def plainly(rows: Tensor, weight: Tensor) -> Sampled:
    """The same by their definitions, a canvas after the other."""
    parts = []
    for some in rows.split(256):
        logits = SOFTCAP * torch.tanh(F.linear(some, weight).float() / SOFTCAP)
        probs = logits.softmax(dim=-1)
        entropy = logits.logsumexp(dim=-1) - (probs * logits).sum(dim=-1)
        parts.append((logits.argmax(dim=-1), entropy, probs.to(weight.dtype) @ weight))
    argmax, entropy, soft = (torch.cat(part) for part in zip(*parts, strict=True))
    return argmax, entropy, soft


def has_stock() -> bool:
    """Whether vLLM is installed; a stub of it has no models."""
    try:
        return importlib.util.find_spec("vllm.model_executor.models") is not None
    except ModuleNotFoundError:
        return False


def draws_of(rows: Tensor) -> RowDraws:
    """Temperature 1 and one seed."""
    ones = torch.ones(len(rows), device=rows.device)
    zeros = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)
    return RowDraws(ones, ones, zeros.long(), zeros, zeros, zeros)


def ours(rows: Tensor, head: OutputHead, *, tile: int | None = None) -> Sampled:
    """The same by this package."""
    results = sample_rows(head, rows, draws_of(rows), None, 0, tile)
    assert results.soft_embeds is not None
    return results.argmax, results.entropy, results.soft_embeds


def ours_again(
    rows: Tensor, head: OutputHead, num_again: int, asked: CandidateFilters | LogprobsRequest
) -> Sampled:
    """The same, and a second look at the first rows, a canvas at a time.

    Args:
        rows: [num_rows, hidden_size].
        head: The projection onto the vocabulary.
        num_again: Rows that are looked at again, of whole canvases.
        asked: Of the rows of each canvas.
    """
    sampled, draws = ours(rows, head), draws_of(rows)
    values = asked.top_p if isinstance(asked, CandidateFilters) else asked.num_token_ids
    assert values is not None
    for start in range(0, num_again, len(values)):
        some = slice(start, start + len(values))
        logits = RowLogits(head.project_all(rows[some]), head.first_id, head.softcap)
        if isinstance(asked, CandidateFilters):
            draw_filtered(head, logits, rows_of(draws, some), asked, head.weight.shape[0])
        else:
            row_logprobs(logits, draws.temperature[some], sampled[0][some], asked, head)
    return sampled


def sampling_settings(
    canvas: int, device: torch.device
) -> dict[str, CandidateFilters | LogprobsRequest]:
    """What a request asks of the rows of its canvas beyond the plain step."""
    ones = torch.ones(canvas, device=device)
    integers = torch.zeros(canvas, dtype=torch.int32, device=device)
    no_ids = integers.long()[:, None][:, :0]
    return {
        "top_p": CandidateFilters(None, ones * 0.95, None),
        "top_k and top_p": CandidateFilters(integers + 64, ones * 0.95, None),
        "logprobs": LogprobsRequest(5, no_ids, integers, as_logits=False),
    }


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


def disagreement(a: Sampled, b: Sampled) -> str:
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
    parser = parser_of(__doc__)
    parser.add_argument("--canvases", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--canvas", type=int, default=256 if on_gpu else 8)
    parser.add_argument("--vocab", type=int, default=262144)
    parser.add_argument("--hidden", type=int, default=2816 if on_gpu else 64)
    parser.add_argument("--settings", action="store_true", help="filters and log-probabilities too")
    parser.add_argument("--tiles", type=int, nargs="*", default=[], help="ids, multiples of 4")
    parser.add_argument("--repeats", type=int, default=20 if on_gpu else 3)
    options = parser.parse_args()
    data = Rows(options.data)

    device = the_device()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    print(
        f"{place()}: vocabulary {options.vocab}, hidden size {options.hidden}, canvas "
        f"{options.canvas}, {dtype}"
    )
    generator = torch.Generator(device).manual_seed(0)
    shape = (options.vocab, options.hidden)
    weight = torch.randn(shape, generator=generator, device=device).to(dtype) * 0.1
    head = OutputHead(weight, weight, 0, SOFTCAP, dtype, F.linear, 1, options.vocab)
    failures = []
    for canvases in options.canvases:
        n = canvases * options.canvas
        rows = torch.randn(n, options.hidden, generator=generator, device=device).to(dtype)
        # Those that serving replays as graphs, and those that it does not.
        graphed: dict[str, Callable[[], Sampled]] = {}
        for tile in [None, *options.tiles]:
            width = "" if tile is None else f", tiles of {tile}"
            graphed[f"ours{width}"] = partial(ours, rows, head, tile=tile)
        calls = dict(graphed)
        if has_stock():
            calls["stock"] = partial(stock, rows, weight, options.canvas)
        if options.settings:
            asked = sampling_settings(options.canvas, device)
            for who, num_again in (("one canvas", options.canvas), ("every canvas", n)):
                for name, setting in asked.items():
                    again = partial(ours_again, rows, head, num_again, setting)
                    calls[f"ours, {name}, {who}"] = again
        expected = calls["stock"]() if has_stock() else plainly(rows, weight)
        for which, call in graphed.items():
            if problem := disagreement(call(), expected):
                failures.append(f"{canvases} canvases, {which}: {problem}")
        del expected
        for which, call in calls.items():
            peak = peak_bytes(call, device)
            eager, low, high = milliseconds(call, options.repeats)
            # Launches outside a graph are slower than what they launch.
            is_graphed = which in graphed and on_gpu
            graph = milliseconds(as_served(call), options.repeats)[0] if is_graphed else None
            per_logit = round(peak / (n * options.vocab), 3)
            data.add(
                "sampler",
                canvases=canvases,
                which=which,
                ms=round(eager, 3),
                quartiles=f"{low:.3f} to {high:.3f}",
                ms_graph=None if graph is None else round(graph, 3),
                peak_mib=round(peak / 2**20, 1),
                bytes_a_logit=per_logit,
            )
            if which == "ours" and per_logit > 1:
                failures.append(f"{canvases} canvases: {per_logit:.2f} bytes a logit, not 1")
    if options.settings:
        print(
            "Rows with settings are projected again, a canvas at a time, whole: also in a small pass."
        )
    for failure in failures:
        print(f"WRONG: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
